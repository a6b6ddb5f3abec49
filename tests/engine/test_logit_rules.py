"""Penalties, biases and masks through whole engines: the tokens are those of transformers' logits
under the rules of `tests/models/rules_reference.py`."""

import asyncio

import pytest
import torch

from nanoactor import SamplingParams
from nanoactor.errors import InvalidRequest
from nanoactor.text.tokenizer import load_tokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import TIE, Reference, collect, engine, greedy, ids, ragged_prompts
from tests.engine.schedules import schedules
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.rules_reference import ruled

VOCABULARY = 211
RULES = [
    dict(repetition_penalty=1.5),
    dict(presence_penalty=2.0, frequency_penalty=-0.4),
    dict(frequency_penalty=2.0),
    dict(logit_bias={token: (token % 7) - 3.0 for token in range(VOCABULARY)}),
    dict(allowed_token_ids=[3, 50, 51, 120, 207]),
    dict(),
    dict(
        allowed_token_ids=list(range(0, VOCABULARY, 2)),
        logit_bias={4: 5.0, 6: -100.0},
        repetition_penalty=0.8,
        presence_penalty=0.3,
    ),
]


class RuledReference(Reference):
    """Every token is the arg-max of transformers' logits under the request's rules."""

    def check_rules(self, prompt, output, rules):
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *output]])).logits[0].float()
        for at, token in enumerate(output):
            row = ruled(logits[len(prompt) - 1 + at].numpy(), prompt, output[:at], **rules)
            best, second = torch.from_numpy(row).topk(2).values.tolist()
            self.positions += 1
            if best - second < TIE:
                self.ties += 1
            else:
                assert token == row.argmax(), f"token {at} of {output} under {rules}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rules")
    return directory, RuledReference(make_checkpoint(directory, **CONFIGURATIONS["untied"]))


async def answers(directory, prompts, **changes):
    async with engine(directory, **changes) as llm:
        requests = [
            collect(llm, ids(prompt), greedy(24, **RULES[n % len(RULES)]))
            for n, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*requests), await llm.statistics()


@schedules()
def test_every_schedule_keeps_the_rules(checkpoint, schedule):
    directory, reference = checkpoint
    stem = ragged_prompts(VOCABULARY, [24], seed=4)[0]
    tails = ragged_prompts(VOCABULARY, [1 + n for n in range(14)], seed=6)
    prompts = [stem[: 4 * (n % 7)] + tail for n, tail in enumerate(tails)]
    outputs, figures = asyncio.run(answers(directory, prompts, **schedule.changes))
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 24
        reference.check_rules(prompt, tokens, RULES[number % len(RULES)])
    reference.conclude()
    schedule.check(figures)


def test_a_ruled_request_among_others_changes_nothing_for_them(checkpoint):
    directory, _ = checkpoint
    prompts = ragged_prompts(VOCABULARY, [9, 17, 30], seed=2)
    plain = [
        greedy(16),
        SamplingParams.for_model(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True),
    ]

    async def main(others):
        async with engine(directory) as llm:
            requests = [collect(llm, ids(p), how) for p, how in zip(prompts, plain, strict=False)]
            if others:
                how = greedy(16, frequency_penalty=1.0)
                requests.append(collect(llm, ids(prompts[2]), how))
            outputs = await asyncio.gather(*requests)
            return [output.outputs[0].token_ids for output in outputs[:2]]

    assert asyncio.run(main(True)) == asyncio.run(main(False))


def test_rules_that_leave_nothing_end_their_request_alone():
    """A word of two tokens rules out the only allowed id, once that has been said."""
    word = "zz"
    token, again = load_tokenizer(DEMO).encode(word, add_special_tokens=False).ids
    assert token == again

    async def main():
        async with text_engine() as llm:
            return await asyncio.gather(
                collect(llm, "ROMEO:", greedy(9, allowed_token_ids=[token], bad_words=[word])),
                collect(llm, "ROMEO:", greedy(9)),
                collect(llm, "ROMEO:", greedy(9, allowed_token_ids=[token])),
                return_exceptions=True,
            )

    ended, plain, allowed = asyncio.run(main())
    assert isinstance(ended, InvalidRequest)
    assert "leave no token to choose" in str(ended)
    assert len(plain.outputs[0].token_ids) == 9
    assert allowed.outputs[0].token_ids == [token] * 9


def text_engine(**changes):
    return engine(DEMO, skip_tokenizer_init=False, **changes)


def test_bad_words_are_not_said():
    async def main():
        async with text_engine() as llm:
            prompt = "ROMEO:\nBut soft, what light"
            free = await collect(llm, prompt, greedy(60))
            words = ["I'll", " sir", "tell", "ROMEO"]
            return (
                free.outputs[0].text,
                words,
                (await collect(llm, prompt, greedy(60, bad_words=words))).outputs[0].text,
            )

    free, words, text = asyncio.run(main())
    assert any(word in free for word in words)
    assert not any(word in text for word in words), text


def test_what_leaves_nothing_from_the_start_is_refused():
    (z,) = load_tokenizer(DEMO).encode("z", add_special_tokens=False).ids
    end = 2  # of sequence

    async def main():
        async with text_engine() as llm:
            for rules, match in (
                (dict(allowed_token_ids=[z], bad_words=["z"]), "each of the allowed ids"),
                (dict(allowed_token_ids=[end], min_tokens=1), "each of the allowed ids"),
                (dict(bad_words=["x " * 120]), "tokens, but at most 32"),
                (dict(allowed_token_ids=[99_999]), "outside the vocabulary"),
                (dict(logit_bias={99_999: 1}), "outside the vocabulary"),
            ):
                with pytest.raises(InvalidRequest, match=match):
                    await collect(llm, "ROMEO:", SamplingParams.for_model(max_tokens=4, **rules))
            return await collect(llm, "ROMEO:", greedy(3))

    assert len(asyncio.run(main()).outputs[0].token_ids) == 3
