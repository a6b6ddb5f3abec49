"""Every await of the public API is cancelled at each place where it waits, nothing hangs, nothing
is left, and errors are ours. So it is where the engine is closed, or a request is aborted, at each
place where a start, a close or a recovery waits."""

import asyncio
import gc
import os
import signal

import pytest

from nanoactor import AsyncLLM, BeamSearchParams, NanoactorError, SamplingParams
from nanoactor.errors import EngineClosed
from nanoactor.runtime.nodes import Nodes
from nanoactor.runtime.recoveries import Recoveries
from tests.conftest import check_descriptors, children, descriptors
from tests.engine.harness import collect, settled
from tests.suspensions import cancelled, interrupted, places

FEW = SamplingParams.for_model(max_tokens=6, ignore_eos=True)
HELD = SamplingParams.for_model(max_tokens=3, logprobs=2, ignore_eos=True)


def engine(**options):
    shape = dict(device="simulated:1", max_model_len=128, placement="single", stop_timeout=10.0)
    return AsyncLLM("demo", **shape | options)


def is_ours(result):
    """A value, a cancellation, or an error of the engine's."""
    if isinstance(result, BaseException):
        assert isinstance(result, asyncio.CancelledError | NanoactorError), repr(result)
    return True


def at_every_place(main):
    """Run it with 1, 2, ... until it says that there was no such place; nothing is left. Returns
    the last number."""
    gc.collect()  # what other tests have left
    before = descriptors()
    for at in places():
        if not asyncio.run(main(at)):
            break
    check_descriptors(before)
    assert not children()
    return at


async def held(llm):
    request = llm.submit_held("To be", HELD)
    try:
        await request.held()
        request.resume_held([0], [5])
        await request.held()
    finally:
        request.close()


async def begun(llm):
    (request,) = llm.submit(["To be"], FEW)
    try:
        await request.accepted()
        await request.wait_for_output()
        return [output async for output in request]
    finally:
        request.close()


async def aborted(llm):
    stream = asyncio.ensure_future(collect(llm, "To be", FEW, request_id="x"))
    await asyncio.sleep(0.002)
    await llm.abort("x")
    return await stream


async def waits(llm):
    requests = llm.submit(["To be"] * 4, FEW)
    try:
        await llm.wait_for_capacity()
    finally:
        for request in requests:
            request.close()


CALLS = {
    "generate": lambda llm: collect(llm, "To be", FEW),
    "chat": lambda llm: collect(llm, [{"role": "user", "content": "To be"}], FEW),
    "several answers": lambda llm: collect(
        llm, "To be", SamplingParams.for_model(max_tokens=4, n=3, ignore_eos=True)
    ),
    "beam search": lambda llm: llm.beam_search("To", BeamSearchParams(beam_width=2, max_tokens=3)),
    "held answers": held,
    "a request": begun,
    "an abort": aborted,
    "room in the queue": waits,
    "statistics": lambda llm: llm.statistics(),
    "activity": lambda llm: llm.activity(0, 1_000_000, 4),
    "trace": lambda llm: llm.trace(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_cancelled_wherever_it_waits(name):
    async def main():
        async with engine(max_num_seqs=3) as llm:
            for at in places():
                result, met = await asyncio.wait_for(cancelled(CALLS[name](llm), at), 60)
                assert is_ours(result)
                await asyncio.wait_for(settled(llm), 60)
                if not met:
                    assert not isinstance(result, BaseException)
                    break
            assert len((await collect(llm, "To be", FEW)).outputs[0].token_ids) == 6

    asyncio.run(main())
    assert not children()


def test_a_call_is_met_by_a_close_wherever_it_waits():
    async def main(at):
        llm = await engine().start()
        result, met = await asyncio.wait_for(
            interrupted(collect(llm, "To be", FEW), at, llm.close), 60
        )
        if not met:
            await llm.close()
            return False
        assert is_ours(result)
        with pytest.raises(EngineClosed):
            llm.submit(["a"], FEW)
        return True

    asyncio.run(main(1))  # the first engine opens what all share
    gc.collect()  # what other tests have left
    before = descriptors()
    met = [asyncio.run(main(at)) for at in range(1, 5)]
    assert met[0], "the others may be merged where the machine is busy"
    check_descriptors(before)
    assert not children()


def test_a_close_is_cancelled_wherever_it_waits():
    """The end goes on; whoever closes again waits for it."""

    async def main(at):
        llm = await engine().start()
        stream = asyncio.ensure_future(
            collect(llm, "To be", SamplingParams.for_model(max_tokens=100))
        )
        await asyncio.sleep(0.01)
        _, met = await cancelled(llm.close(), at)
        await asyncio.wait_for(llm.close(), 60)
        (ended,) = await asyncio.gather(stream, return_exceptions=True)
        assert is_ours(ended)
        return met

    at_every_place(main)


INTERRUPTIONS = {
    "close": lambda llm, stream: llm.close(),
    "abort": lambda llm, stream: llm.abort("x"),
    "cancel": lambda llm, stream: stream.cancel() and None,
}


async def started_with(monkeypatch, llm, at, act):
    """Start an engine; something happens at the `at`-th suspension of the start of its nodes."""
    start, met = Nodes._launch, []

    async def watched(nodes):
        result, was_met = await interrupted(start(nodes), at, act)
        met.append(was_met)
        if isinstance(result, BaseException):
            raise result

    monkeypatch.setattr(Nodes, "_launch", watched)
    (result,) = await asyncio.gather(llm.start(), return_exceptions=True)
    monkeypatch.setattr(Nodes, "_launch", start)
    return result, any(met)


@pytest.mark.parametrize("placement", ["single", pytest.param("default", marks=pytest.mark.long)])
def test_a_start_is_met_by_a_close_wherever_it_waits(monkeypatch, placement):
    async def main(at):
        llm = engine(**{} if placement == "single" else {"placement": "default"})
        result, met = await asyncio.wait_for(started_with(monkeypatch, llm, at, llm.close), 60)
        assert is_ours(result)
        assert met == isinstance(result, EngineClosed)
        await asyncio.wait_for(llm.close(), 60)
        return met

    at_every_place(main)


@pytest.mark.deadly
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("close", "detokenizer"),
        pytest.param("close", "control", marks=pytest.mark.long),
        pytest.param("abort", "control", marks=pytest.mark.long),
        pytest.param("abort", "tokenizer.0", marks=pytest.mark.long),
        pytest.param("cancel", "runner.0", marks=pytest.mark.long),
    ],
)
def test_a_recovery_is_met_wherever_it_waits(monkeypatch, how, victim):
    recover, met = Recoveries._run, []

    async def main(at):
        llm = await engine(placement="default", device="simulated:5").start()
        stream = asyncio.ensure_future(
            collect(
                llm,
                "To be",
                SamplingParams.for_model(max_tokens=80, ignore_eos=True),
                request_id="x",
            )
        )
        await asyncio.sleep(0.1)

        def interrupt():
            met.append(True)  # here, because closing the engine may cancel `watched`
            return INTERRUPTIONS[how](llm, stream)

        async def watched(recoveries):
            result, _ = await interrupted(recover(recoveries), at, interrupt)
            if isinstance(result, BaseException):
                raise result

        monkeypatch.setattr(Recoveries, "_run", watched)
        met.clear()
        os.kill(llm.pids[victim], signal.SIGKILL)
        try:
            (ended,) = await asyncio.wait_for(asyncio.gather(stream, return_exceptions=True), 60)
            assert is_ours(ended)
            while how != "close" and llm.recovering:
                await asyncio.sleep(0.01)
            if how != "close":
                assert len((await collect(llm, "To be", FEW)).outputs[0].token_ids) == 6
                await settled(llm)
        finally:
            monkeypatch.setattr(Recoveries, "_run", recover)
            await asyncio.wait_for(llm.close(), 60)
        return bool(met)

    assert at_every_place(main) > 3, "a recovery waits in several places"
