"""A layer that keeps an array for each sequence, under every schedule: see
`tests/models/summing.py`, whose rows fail where a state is not that of the positions before."""

import asyncio
import dataclasses
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor import BeamSearchParams, SamplingParams
from nanoactor.errors import NotEnoughMemory
from nanoactor.models.config import read_config
from nanoactor.models.families.registry import FAMILIES
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine import test_matrix
from tests.engine.beam_reference import search
from tests.engine.conftest import DEMO
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.engine.schedules import NO_CACHE, TIGHT, schedules
from tests.engine.test_beam_search import EOS, VOCABULARY, Comparison
from tests.engine.test_matrix import (
    BUDGETS,
    DEPTHS,
    LEADS,
    Load,
    counts,
    covering,
    ends,
    one,
    storm,
)
from tests.models.summing import make_summing_checkpoint
from tests.models.summing_family import SUMMING, register

ROOT = Path(__file__).parents[2]
DEEPEST = 4
"""As many steps in flight as an engine allows."""
USUAL = {*covering(), ("untied", (4, 5), DEEPEST, "late")}
"""Schedules that each `make test` runs."""


@pytest.fixture(autouse=True, scope="module")
def family():
    register()
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join((str(ROOT / "tests/models/site"), str(ROOT)))
        patch.setenv("PYTHONPATH", path)
        yield
    del FAMILIES[SUMMING.architecture]


@pytest.fixture(scope="module")
def summing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("summing")
    return directory, make_summing_checkpoint(directory, num_hidden_layers=3)


class StatefulLoad(Load):
    def hit(self, job):
        """Nothing of a prompt is ever found: no block says what the sums were at its end."""
        return 0


@pytest.fixture(scope="module")
def load(summing):
    return StatefulLoad(*summing)


@pytest.mark.parametrize(
    ("budget", "depth", "lead"),
    [
        pytest.param(*v, marks=() if ("untied", *v) in USUAL else pytest.mark.long)
        for v in [(b, d, lead) for b in BUDGETS for d in (*DEPTHS, DEEPEST) for lead in LEADS]
    ],
    ids=str,
)
def test_every_schedule_gives_the_same_tokens(load, budget, depth, lead):
    asyncio.run(under_load(load, budget, depth, lead))


async def under_load(load, budget, depth, lead):
    seqs, tokens = budget
    changes = dict(max_num_seqs=seqs, max_num_batched_tokens=tokens, **test_matrix.CACHE)
    changes |= dict(pipeline_depth=depth, max_pipeline_depth=max(depth, *DEPTHS))
    async with engine(load.directory, plan_lead=lead, **changes) as llm:
        for job in load.near:
            assert (await one(llm, load, job)).num_cached_tokens == 0
        await ends(llm, load)
        await storm(llm, load, random.Random(f"{budget} {depth} {lead}"))
        figures = await counts(llm)
    assert (figures["preemptions"] > 0) == (seqs > 1)
    assert figures["hit_tokens"] == figures["evictions"] == 0


def test_a_prompt_that_was_computed_is_computed_again(summing):
    """Of two equal prompts nothing of the second is found."""
    prompt = ragged_prompts(211, [40], seed=3)[0]

    async def main():
        async with engine(summing[0], block_size=4) as llm:
            for _ in range(2):
                await collect(llm, ids(prompt), greedy(1))
            return await counts(llm)

    assert asyncio.run(main())["prefill_tokens"] == 2 * len(prompt)


@schedules("deep", "preempted", "preempted, no cache", "ranks")
def test_answers_to_one_prompt_begin_with_copies_of_its_sums(summing, schedule):
    directory, model = summing
    prompts = ragged_prompts(211, [7, 8, 21], seed=4)
    how = [SamplingParams.for_model(seed=s, n=4, max_tokens=30, logprobs=0) for s in range(3)]

    async def main():
        async with engine(directory, **schedule.changes) as llm:
            requests = (collect(llm, ids(p), h) for p, h in zip(prompts, how, strict=True))
            return await asyncio.gather(*requests), await llm.statistics()

    outputs, figures = asyncio.run(main())
    schedule.check(figures)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
        for answer in output.outputs:
            check_logprobs(model, prompt, answer)


def check_logprobs(model, prompt, answer):
    """What was drawn is as likely as the reference says."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    expected = expected[range(len(answer.token_ids)), answer.token_ids]
    found = [
        step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(TIGHT, **NO_CACHE, max_num_batched_tokens=24),
        dict(TIGHT, pipeline_depth=DEEPEST, max_pipeline_depth=DEEPEST),
    ],
    ids=["wide", "tight", "deep"],
)
@pytest.mark.parametrize("width", [2, 3])
def test_beams_swap_their_sums(tmp_path, width, changes):
    """Beams become copies of each other at every step."""
    model = make_summing_checkpoint(tmp_path, vocab_size=VOCABULARY, eos_token_id=list(EOS))
    prompts = ragged_prompts(VOCABULARY, [3, 8, 12, 5], seed=width)
    how = BeamSearchParams(beam_width=width, max_tokens=8)

    async def main():
        async with engine(tmp_path, **(dict(block_size=4) | changes)) as llm:
            return await asyncio.gather(*(llm.beam_search(ids(p), how) for p in prompts))

    comparison = Comparison()
    for prompt, output in zip(prompts, asyncio.run(main()), strict=True):
        expected = search(model, prompt, width, 8, EOS)
        comparison.check(prompt, output, expected)
    assert comparison.compared >= 2


@pytest.mark.parametrize("depth", [1, 4])
def test_steps_planned_past_an_end_change_no_other_sums(summing, depth):
    """Four steps may be in flight when a token ends its sequence, and its slot is given away."""
    directory, model = summing
    reference = Reference(model)
    prompts = ragged_prompts(211, [5, 9, 16, 30] * 6, seed=depth)
    stops = SamplingParams.for_model(
        temperature=0.0, max_tokens=40, stop_token_ids=[*range(3, 211, 9)]
    )

    async def main():
        changes = dict(pipeline_depth=depth, max_pipeline_depth=4, max_num_seqs=4, block_size=4)
        async with engine(directory, **changes) as llm:
            return await asyncio.gather(*(collect(llm, ids(p), stops) for p in prompts))

    outputs = asyncio.run(main())
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """The same with the demo's tokenizer, so that grammars can be about its text."""
    directory = tmp_path_factory.mktemp("reading")
    vocabulary = read_config(DEMO).vocab_size
    make_summing_checkpoint(directory, vocab_size=vocabulary, max_position_embeddings=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return directory


@pytest.mark.parametrize("device", ["cpu", "rows of one sequence in one step"])
def test_runs_that_a_grammar_forces_are_summed_once(reading, device, monkeypatch):
    """A row that begins where its sum does not ends its request. Devices on which several rows of a
    sequence may share a step compute runs as chunks all the same."""
    if device != "cpu":
        original = devices.open_device

        def open_device(*arguments):
            found = original(*arguments)
            found.traits = dataclasses.replace(found.traits, min_rows_for_runs=1)
            return found

        monkeypatch.setattr(devices, "open_device", open_device)
    kinds = [
        dict(regex=r"(a|b){6} a run that is forced (c|d){3} and one more"),
        dict(choice=["one long answer", "one longer answer", "another"]),
        dict(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}),
    ]

    def params(seed):
        what = StructuredOutputsParams(**kinds[seed % len(kinds)])
        return SamplingParams.for_model(seed=seed, max_tokens=40, structured_outputs=what)

    async def main(**changes):
        options = dict(skip_tokenizer_init=False, block_size=4, max_num_seqs=4, **changes)
        async with engine(reading, **options) as llm:
            requests = (collect(llm, f"What {seed}?", params(seed)) for seed in range(9))
            return [o.outputs[0].token_ids for o in await asyncio.gather(*requests)]

    expected = asyncio.run(main(pipeline_depth=1, jump_forward=False, max_num_batched_tokens=4))
    assert asyncio.run(main(pipeline_depth=3, max_pipeline_depth=4)) == expected


@pytest.mark.deadly
@pytest.mark.parametrize("name", ["control", "runner.0"])
def test_a_stream_goes_on_after_a_death_with_its_prefix_computed_again(summing, name):
    """Whoever dies: what survives in blocks says nothing of sums."""
    directory, model = summing
    (prompt,) = ragged_prompts(211, [30], seed=6)

    async def main():
        changes = dict(placement="default", block_size=4, restart_window=0.01)
        changes |= dict(pipeline_depth=DEEPEST, max_pipeline_depth=DEEPEST)
        async with engine(directory, **changes) as llm:
            told, pid, at, before = [], llm.pids[name], 0, None
            async for output in llm.generate(ids(prompt), greedy(400)):
                told = output.outputs[0].token_ids
                if before is None and len(told) >= 20:
                    at, before = len(told), await counts(llm)
                    os.kill(pid, signal.SIGKILL)
            assert llm.pids[name] != pid
            return told, at, before, await counts(llm)

    told, at, before, after = asyncio.run(main())
    reference = Reference(model)
    assert at < len(told) == 400
    reference.check(prompt, told)
    assert before["prefill_tokens"] == len(prompt)
    assert after["hit_tokens"] == 0
    # The counts are of the life after the death: prompt and output so far, once.
    assert len(prompt) + at <= after["prefill_tokens"] < len(prompt) + len(told)


def test_states_that_do_not_fit_are_refused_with_the_arithmetic(summing, monkeypatch):
    directory, _ = summing
    assert read_config(directory).architecture == "SummingForCausalLM"
    monkeypatch.setattr(
        "nanoactor.models.layers.state.SlotState.bytes_per_slot", property(lambda self: 1 << 40)
    )

    async def main():
        async with engine(directory, max_num_seqs=8):
            pass

    with pytest.raises(NotEnoughMemory, match=r"MiB of states .* for each of 8 sequences"):
        asyncio.run(main())
