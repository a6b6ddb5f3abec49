"""Biases, penalties and masks against NumPy, for whole vocabularies and for ranks' parts of one."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from nanoactor.messages.engine import TokenRules
from nanoactor.models.batch import SlotTables
from nanoactor.models.sampling.columns import WORDS, column_views, pack
from nanoactor.models.sampling.logit_rules import TokenIds, apply_rules
from nanoactor.models.sampling.rows import LogitRules
from nanoactor.runner.batch.sampling_table import SamplingTable
from nanoactor.runner.steps.warmup import admissions
from tests.models.rules_reference import ruled

VOCABULARY, BLOCK, SLOTS = 23, 4, 6
tokens = st.integers(0, VOCABULARY - 1)
penalties = st.sampled_from([0.0, 0.5, -2.0, 2.0, 0.1])


@st.composite
def requests(draw):
    """A sequence, and the rules of its request."""
    rules = {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7, 100.0, 0.01])),
        "frequency_penalty": draw(penalties),
        "presence_penalty": draw(penalties),
        "logit_bias": draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5)),
        "bad_words": draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)),
        "allowed_token_ids": draw(st.none() | st.lists(tokens, min_size=1, max_size=9)),
    }
    if draw(st.booleans()) and draw(st.booleans()):  # on every id
        rules["logit_bias"] = {token: draw(st.sampled_from([-100.0, 3.5])) for token in range(23)}
    prompt = draw(st.lists(tokens, min_size=1, max_size=20))
    return prompt, draw(st.lists(tokens, max_size=12)), rules


def int32(values):
    return np.array(list(values), np.int32)


def message(rules):
    words, allowed = rules.get("bad_words", ()), rules.get("allowed_token_ids")
    biases = rules.get("logit_bias") or {}
    return TokenRules(
        int32(sorted(set(allowed or ()))),
        int32(biases),
        np.array(list(biases.values()), np.float32),
        int32(token for word in words for token in word),
        int32(map(len, words)),
    )


def state(cases):
    """(the runner's table, where the ids lie, the rows' slots) of sequences with their rules."""
    slots = int32(reversed(range(SLOTS - len(cases), SLOTS)))
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    words = [
        pack({name: rules[name] for name in penalties if name in rules}) for *_, rules in cases
    ]
    table = SamplingTable(SLOTS)
    new = dataclasses.replace(
        admissions(slots),
        sampling=np.frombuffer(b"".join(words), np.int32).reshape(-1, WORDS),
        prompt_lengths=int32(len(prompt) for prompt, *_ in cases),
        rule_rows=int32(range(len(cases))),
        rules=tuple(message(rules) for *_, rules in cases),
    )
    table.admit(new)
    return table, _placed(cases, slots), slots.astype(np.int64)


def _placed(cases, slots):
    """The ids in blocks that lie in no order, with garbage around them."""
    blocks = torch.randperm(SLOTS * 10, generator=torch.Generator().manual_seed(1)).int()
    blocks = blocks.view(SLOTS, 10)
    lengths, prompts = torch.zeros(SLOTS).int(), torch.zeros(SLOTS).int()
    columns = torch.zeros(WORDS, SLOTS).int()
    tables = SlotTables(blocks, lengths, lengths.clone(), None, columns, BLOCK, lengths, columns)
    placed = TokenIds(torch.randint(0, VOCABULARY, (SLOTS * 10 * BLOCK,)).int(), prompts, tables)
    for (prompt, output, _), slot in zip(cases, slots.tolist(), strict=True):
        positions = torch.arange(len(prompt) + len(output))
        places = blocks[slot, positions // BLOCK].long() * BLOCK + positions % BLOCK
        placed.write(places, torch.tensor([*prompt, *output]).int())
        lengths[slot], prompts[slot] = len(positions), len(prompt)
    return placed


def on_device(rules, longest):
    names = [name for name in LogitRules.__dataclass_fields__ if name != "longest"]
    arrays = {name: torch.from_numpy(getattr(rules, name)) for name in names}
    return LogitRules(**arrays, longest=longest)


def applied(cases, logits, ranks=1):
    """The logits under the rules, put together again from the parts of so many ranks."""
    table, placed, slots = state(cases)
    rows = table.rows(slots, np.arange(len(slots)))
    assert rows.rules is not None
    longest = max(len(prompt) + len(output) for prompt, output, _ in cases)
    rules = on_device(rows.rules, longest)
    sampling = column_views(torch.from_numpy(table.words[:, slots]), torch.float32)
    width = -(-VOCABULARY // ranks)
    parts = [
        apply_rules(part, rules, sampling, torch.from_numpy(slots), placed, rank * width)
        for rank, part in enumerate(logits.split(width, dim=1))
    ]
    return torch.cat(parts, dim=1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=SLOTS), st.integers(0, 99), st.sampled_from([1, 3])
)
def test_logits_under_rules_are_those_of_numpy(cases, seed, ranks):
    logits = torch.randn(len(cases), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    found = applied(cases, logits.clone(), ranks).numpy()
    for row, (prompt, output, rules) in enumerate(cases):
        expected = ruled(logits[row].numpy(), prompt, output, **rules)
        np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rules", "change"),
    [
        ("allowed", dict(allowed_token_ids=[2, 3]), {0: -np.inf, 1: -np.inf, 2: 0, 3: 0}),
        ("a word", dict(bad_words=[[4]]), {4: -np.inf}),
        ("a word's end", dict(bad_words=[[9, 8, 4]]), {4: -np.inf, 8: 0, 9: 0}),
        ("another word's end", dict(bad_words=[[8, 8, 4]]), {4: 0}),
        ("a word that began in the prompt", dict(bad_words=[[5, 9, 9, 8, 4]]), {4: 0}),
        ("a bias", dict(logit_bias={3: -100, 4: 0.5}), {3: -100, 4: 0.5, 5: 0}),
        ("repetition", dict(repetition_penalty=2.0), {5: -1.0, 8: -4.0, 9: 3 * 0.5 - 3, 7: 0}),
        ("frequency", dict(frequency_penalty=0.5), {9: -1.0, 8: -0.5, 5: 0}),
        ("presence", dict(presence_penalty=0.5), {9: -0.5, 8: -0.5, 5: 0}),
        (
            "a bias before a penalty, and that before what is subtracted",
            dict(logit_bias={8: 10}, repetition_penalty=2.0, presence_penalty=1.0),
            {8: (-4.0 + 10) / 2 - 1.0 + 4.0},
        ),
    ],
)
def test_each_step_of_the_order(name, rules, change):
    """After the prompt 5 and the output 9 9 8; logits 5: 2, 8: -4, 9: 3, others 1."""
    logits = torch.ones(1, VOCABULARY)
    logits[0, 5], logits[0, 8], logits[0, 9] = 2.0, -4.0, 3.0
    found = applied([([5], [9, 9, 8], rules)], logits.clone())[0] - logits[0]
    for token, difference in change.items():
        assert found[token].item() == pytest.approx(difference), (name, token)


def test_penalties_and_words_are_those_of_transformers():
    prompt, output = [3, 7, 7, 1], [5, 6, 5]
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3
    ids = torch.tensor([[*prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())
    found = applied([(prompt, output, dict(repetition_penalty=1.4))], logits.clone())
    torch.testing.assert_close(found, expected)
    words = [[6, 5, 2], [4], [5, 5, 8]]
    expected = NoBadWordsLogitsProcessor(words)(ids, logits.clone())
    found = applied([(prompt, output, dict(bad_words=words))], logits.clone())
    torch.testing.assert_close(found, expected)


def test_rows_without_rules_are_left_alone():
    cases = [([1, 2], [3], {}), ([1], [2], dict(presence_penalty=1.0)), ([4], [5], {})]
    logits = torch.randn(3, VOCABULARY)
    found = applied(cases, logits.clone())
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert not torch.equal(found[1], logits[1])
