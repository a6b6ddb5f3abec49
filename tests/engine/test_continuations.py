"""An answer goes on in another engine, behind any cut: what was told and what follows make the same
as undisturbed."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest

from nanoactor import AsyncLLM, InvalidRequest, OutputSoFar, RequestOutputKind, SamplingParams
from nanoactor.errors import EngineOverloaded
from nanoactor.requests.params import derived_seed
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine.conftest import DEMO
from tests.engine.harness import on_a_loop, options, settled, short
from tests.engine.test_recovery import CHAT, TEXT, Told, asks, compare_logprobs, constrained
from tests.engine.test_vision import conversation, drawn

DEMO_VL = DEMO.parent / "demo_vl"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def kinds():
    """What recovery is tried with, and what only text can show."""
    found = [
        (prompt, params)
        for prompt, params in asks()
        if params.output_kind is not RequestOutputKind.FINAL_ONLY
    ]
    brief = dict(max_tokens=40, ignore_eos=True)
    found += [
        (TEXT, constrained(20, json=SCHEMA)),  # its keys are forced
        (TEXT, SamplingParams.for_model(seed=21, stop=["e", "a t"], min_tokens=20, max_tokens=60)),
        (TEXT, SamplingParams.for_model(seed=22, stop=["th"], include_stop_str_in_output=True)),
        (  # bytes that are no whole characters
            TEXT,
            SamplingParams.for_model(
                seed=23, allowed_token_ids=list(range(1, 130)), temperature=2.0, **brief
            ),
        ),
        (TEXT, SamplingParams.for_model(seed=24, logprobs=3, n=3, stop=["\n"], max_tokens=50)),
        (TEXT, SamplingParams.for_model(seed=25, repetition_penalty=1.3, **brief)),
        (TEXT, SamplingParams.for_model(seed=26, max_tokens=1)),
    ]
    return found


async def deltas(llm, prompt, params, so_far=None):
    """Of each answer: what each output has told."""
    params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    found = [[] for _ in range(params.n)]
    async for output in llm.generate(prompt, params, so_far=so_far):
        for delta in output.outputs:
            found[delta.index].append(delta)
    return found


def joined(parts):
    told = Told()
    for delta in parts:
        assert not told.ends, "something follows the end"
        told.text += delta.text
        told.ids += delta.token_ids
        told.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            told.ends, told.reason = 1, (delta.finish_reason, delta.stop_reason)
    return told


def so_far(parts):
    told = joined(parts)
    return OutputSoFar(told.ids, len(told.text))


def own(params, index):
    """The parameters of one of several answers."""
    return dataclasses.replace(params, n=1, seed=derived_seed(params.seed, index))


def check(before, after, whole):
    """Two parts make the whole; offsets count the answer as one."""
    told, right = joined([*before, *after]), joined(whole)
    assert (told.text, told.ids, told.reason) == (right.text, right.ids, right.reason)
    compare_logprobs(told.logprobs, right.logprobs)
    offsets = [at for delta in (*before, *after) for at in delta.text_offsets or []]
    assert offsets == [at for delta in whole for at in delta.text_offsets or []]


@contextlib.asynccontextmanager
async def two_engines(directory=DEMO, **changes):
    """They have the same weights, and nothing else in common."""
    values = short(skip_tokenizer_init=False, **changes)
    async with AsyncLLM(str(directory), **values) as one, AsyncLLM(str(directory), **values) as two:
        yield one, two
        await settled(two)


async def continue_every_cut(one, two, prompt, params, most=None):
    """Cut each answer between any two of its deltas, and let the other engine go on."""
    whole = await deltas(one, prompt, params)
    cuts = [(index, at) for index, parts in enumerate(whole) for at in range(len(parts))]
    if most is not None and len(cuts) > most:
        cuts = cuts[:: -(-len(cuts) // most)] + cuts[-2:]

    async def go_on(index, at):
        before = whole[index][:at]
        (after,) = await deltas(two, prompt, own(params, index), so_far(before))
        check(before, after, whole[index])

    for first in range(0, len(cuts), 16):
        await asyncio.gather(*(go_on(*cut) for cut in cuts[first : first + 16]))
    return len(cuts)


@pytest.mark.parametrize("most", [10, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("part", range(2))
@on_a_loop
async def test_every_cut(part, most):
    """Engines take longer to start than a kind of request to be cut at 10 places."""
    async with two_engines() as (one, two):
        for prompt, params in kinds()[part::2]:
            cuts = await continue_every_cut(one, two, prompt, params, most)
            assert cuts > 1 or params.max_tokens == 1, params


@pytest.mark.parametrize("most", [6, pytest.param(None, marks=pytest.mark.long)])
@on_a_loop
async def test_every_cut_of_answers_about_images(most):
    images = [drawn("47"), drawn("8")]
    async with two_engines(DEMO_VL, max_model_len=512) as (one, two):
        place = one.files.config.vision.image_token_id
        by_ids = {"prompt_token_ids": [40, place, 41, place, 42]}
        prompts = [
            conversation("read: ", *images),
            by_ids | {"multi_modal_data": {"image": images}},
        ]
        for seed, prompt in enumerate(prompts):
            params = SamplingParams.for_model(
                seed=seed, max_tokens=16, ignore_eos=True, temperature=1.5, logprobs=1
            )
            assert await continue_every_cut(one, two, prompt, params, most) > 1


@on_a_loop
async def test_a_continuation_is_cut_again():
    """Moved twice, and once more by a death: here only the first two."""
    async with two_engines() as (one, two):
        params = SamplingParams.for_model(seed=5, max_tokens=60, logprobs=1, stop=["zz"])
        (whole,) = await deltas(one, TEXT, params)
        (second,) = await deltas(two, TEXT, params, so_far(whole[:10]))
        before = [*whole[:10], *second[:15]]
        (third,) = await deltas(one, TEXT, params, so_far(before))
        check(before, third, whole)


@on_a_loop
async def test_cumulative_outputs_hold_what_is_new():
    async with two_engines() as (one, two):
        params = SamplingParams.for_model(seed=5, max_tokens=30, ignore_eos=True)
        (whole,) = await deltas(one, TEXT, params)
        before, after = whole[:12], joined(whole[12:])
        async for output in two.generate(TEXT, params, so_far=so_far(before)):
            (answer,) = output.outputs
        assert (answer.text, answer.token_ids) == (after.text, after.ids)
        assert answer.finish_reason == "length"


@on_a_loop
async def test_it_is_checked_like_any_input():
    async with AsyncLLM(str(DEMO), **short(skip_tokenizer_init=False, max_model_len=256)) as llm:
        params = SamplingParams.for_model(seed=1, max_tokens=4)
        long = SamplingParams.for_model(seed=1)

        async def refused(given, params=params):
            with pytest.raises(InvalidRequest) as caught:
                await deltas(llm, TEXT, params, given)
            return str(caught.value)

        assert "OutputSoFar" in await refused([1, 2])
        assert "outside the vocabulary" in await refused(OutputSoFar([10**6], 0))
        assert "so_far.token_ids" in await refused(OutputSoFar([[1]], 0))
        assert "0 to 2147483647" in await refused(OutputSoFar([-1], 0))
        assert "characters" in await refused(OutputSoFar([1], -1))
        assert "characters" in await refused(OutputSoFar([1], 1.5))
        assert "max_tokens" in await refused(OutputSoFar([1] * 5, 5))
        assert "max_model_len" in await refused(OutputSoFar([1] * 300, 5), long)
        assert "n must be 1, got 2" in await refused(
            OutputSoFar([1], 1), dataclasses.replace(params, n=2)
        )
        # All of it was told but its end.
        (rest,) = await deltas(llm, TEXT, params, OutputSoFar([40] * 4, 4))
        assert joined(rest).ids == []
        assert joined(rest).reason == ("length", None)
        await settled(llm)


@on_a_loop
async def test_a_full_queue_refuses_no_continuation_and_it_goes_first():
    changes = dict(device="simulated:20", max_num_seqs=1, max_waiting_requests=2, dtype="auto")
    async with AsyncLLM(str(DEMO), **short(**changes)) as llm:
        params = SamplingParams.for_model(seed=1, max_tokens=6, ignore_eos=True)
        prompt = {"prompt_token_ids": list(range(50, 70))}
        ends = []

        async def run(name, **more):
            await deltas(llm, prompt, params, **more)
            ends.append(name)

        running = asyncio.ensure_future(run("running"))
        while True:  # until it has its first token
            journal = (await llm.statistics())["frontend"]["actor"]
            if journal["entries"] and not journal["waiting_requests"]:
                break
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(run("waits")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await deltas(llm, prompt, params)
        moved = [
            asyncio.ensure_future(run("moved", so_far=OutputSoFar(ids, 0))) for ids in ([60], [])
        ]
        await asyncio.gather(running, *waiting, *moved)
        assert ends == ["running", "moved", "moved", "waits", "waits"]
        await settled(llm)


@on_a_loop
async def test_a_continuation_can_be_aborted():
    async with two_engines(device="simulated:5", dtype="auto") as (_, two):
        params = SamplingParams.for_model(seed=1, ignore_eos=True, max_tokens=300)
        stream = two.generate(TEXT, params, so_far=OutputSoFar([50] * 20, 20))
        await anext(stream)
        await stream.aclose()


@on_a_loop
async def test_what_is_told_of_the_index_makes_it():
    salt = bytes(range(32))
    values = options(placement="default", prefix_salt=salt, num_kv_blocks=24, max_model_len=256)
    async with AsyncLLM(str(DEMO), **values) as llm:
        assert str(salt) not in repr(llm.config)
        known, block_size = set(), llm.facts["block_size"]

        async def watch():
            async for events in llm.index_events():
                if events.cleared:
                    known.clear()
                known.difference_update(map(bytes, events.forgotten))
                known.update(map(bytes, events.remembered))

        watcher = asyncio.ensure_future(watch())
        from nanoactor.kv.hashing import block_hashes

        for seed in range(6):  # more than the cache holds: blocks are evicted
            prompt = np.random.default_rng(seed).integers(10, 500, 100).astype(np.int32)
            params = SamplingParams.for_model(seed=1, max_tokens=8, ignore_eos=True)
            await deltas(llm, {"prompt_token_ids": prompt.tolist()}, params)
        hashes = {bytes(row) for row in block_hashes(prompt, block_size, salt)}
        for _ in range(200):
            if hashes <= known:
                break
            await asyncio.sleep(0.02)
        assert hashes <= known
        assert len(known) <= 24
        # Another reader is told the same, from the beginning.
        first = await anext(aiter(llm.index_events()))
        assert first.cleared
        assert {bytes(row) for row in first.remembered} == known
        watcher.cancel()
    async with AsyncLLM(str(DEMO), **short()) as llm:
        with pytest.raises(InvalidRequest, match="prefix_salt"):
            llm.index_events()


@on_a_loop
async def test_tokens_of_a_simulated_step_take_time():
    prompt = {"prompt_token_ids": list(range(10, 70))}
    params = SamplingParams.for_model(seed=1, max_tokens=1)
    changes = dict(device="simulated:1+2000", max_num_batched_tokens=64, dtype="auto")
    async with AsyncLLM(str(DEMO), **short(**changes)) as llm:
        await deltas(llm, prompt, params)
        cold = (await llm.statistics())["runner.0"]["actor"]["busy_seconds"]
        await deltas(llm, prompt, params)
        warm = (await llm.statistics())["runner.0"]["actor"]["busy_seconds"] - cold
        assert cold == pytest.approx(0.001 + 60 * 0.002, rel=0.05)
        assert warm == pytest.approx(0.001 + 12 * 0.002, rel=0.05)  # three blocks were cached


def test_structured_outputs_are_tried():
    assert sum(isinstance(p.structured_outputs, StructuredOutputsParams) for _, p in kinds()) >= 3
    assert any(prompt is CHAT for prompt, _ in kinds())
