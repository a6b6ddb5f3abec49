"""Streams of a fleet say what those of one engine say, whoever dies, hangs or leaves."""

import asyncio
import dataclasses
import os
import random
import signal

import pytest

from nanoactor import OutputSoFar, RequestOutputKind, SamplingParams
from nanoactor.errors import (
    ComputationFailed,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    PoisonRequest,
)
from nanoactor.fleet.client import FleetLLM
from nanoactor.fleet.wire import Reserve
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from tests.engine.harness import on_a_loop
from tests.engine.test_continuations import DEMO_VL, kinds
from tests.engine.test_recovery import CHAT, TEXT, compare, read
from tests.engine.test_vision import conversation, drawn
from tests.fleet.local import fleet

pytestmark = pytest.mark.drawn(2)
LONG = pytest.mark.long


async def undisturbed(llm, asked):
    return await asyncio.gather(*(read(llm, *ask) for ask in asked))


@on_a_loop
async def test_every_kind_of_request():
    async with fleet(2) as (llm, local, engines):
        asked = kinds()
        wanted = await undisturbed(engines[0], asked)
        for found, right in zip(await undisturbed(llm, asked), wanted, strict=True):
            compare(found, right)
        assert llm.live == 0
        assert all(replica.hub.streams == [] for replica in local.replicas.values())


@on_a_loop
async def test_images():
    async with fleet(2, model=DEMO_VL, max_model_len=512) as (llm, _, engines):
        asked = [
            (
                conversation("read: ", drawn(text), drawn("1")),
                SamplingParams.for_model(seed=seed, max_tokens=12, temperature=1.2),
            )
            for seed, text in enumerate(("47", "8", "159"))
        ]
        wanted = await undisturbed(engines[0], asked)
        for found, right in zip(await undisturbed(llm, asked), wanted, strict=True):
            compare(found, right)


async def play(number, deaths, seed, **changes):
    """Every kind of request, while replicas die, hang and leave."""
    draw = random.Random(seed)
    async with fleet(number, silence=2.0, **changes) as (llm, local, engines):
        asked = kinds()
        wanted = await undisturbed(engines[0], asked)
        streams = asyncio.gather(*(read(llm, *ask) for ask in asked))
        for _ in range(deaths):
            await asyncio.sleep(draw.uniform(0.05, 0.6))
            if streams.done():
                break
            # A third death of a suspect convicts it, wherever that comes from.
            tried = {name for name, each in local.replicas.items() if each.hub.reserved_by}
            name = draw.choice(sorted(local.members - tried))
            kind = draw.choice(("kill", "hang", "leave"))
            if kind == "kill":
                await local.replace(name)
            elif kind == "hang":
                local.hang(name)
                await lost(llm, name)
                local.resume(name)
            elif len(local.members) > 1:
                local.leave(name)
                local.add(local.replicas[name].llm)
        for found, right in zip(await streams, wanted, strict=True):
            compare(found, right)
        counts = llm.fleet.counts
        assert not counts.lost
        return counts


@on_a_loop
async def test_replicas_die_hang_and_leave():
    counts = await play(2, deaths=4, seed=1)
    assert counts.moved


@LONG
@pytest.mark.parametrize("seed", range(12))
@on_a_loop
async def test_replicas_die_hang_and_leave_again_and_again(seed):
    await play(3, deaths=15, seed=100 + seed)


@on_a_loop
async def test_a_replica_that_comes_back_adds_nothing():
    async with fleet(2, silence=2.0, device="simulated:10", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(seed=1, max_tokens=150, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        name = await where(llm)
        local.hang(name)
        await until(lambda: llm.fleet.counts.deaths)
        local.resume(name)
        compare(await stream, wanted)
        await until(lambda: name in llm.fleet.replicas)
        assert not local.replicas[name].hub.streams


async def where(llm, tokens=5):
    """The replica of the one stream, once that has got some tokens."""
    while True:
        await asyncio.sleep(0.01)
        for replica in llm.fleet.replicas.values():
            for part in replica.parts.values():
                if part.request.tokens_sent >= tokens:
                    return replica.name


async def lost(llm, name):
    await until(lambda: name not in llm.fleet.replicas)


async def until(is_so, seconds=20):
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.01)


@on_a_loop
async def test_an_abort_reaches_the_replica_also_while_its_stream_moves():
    async with fleet(2, device="simulated:10", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(max_tokens=400, ignore_eos=True)
        stream = llm.generate(TEXT, params)
        await anext(stream)
        name = await where(llm)
        await stream.aclose()
        await until(lambda: not local.replicas[name].hub.streams)

        stream = llm.generate(TEXT, params)
        await anext(stream)
        for name in sorted(local.members):  # nobody is left who could take it
            await local.kill(name)
        await until(lambda: llm.fleet.queue.dispatch.waiting)
        await stream.aclose()
        assert llm.live == 0
        assert llm.fleet.queue.dispatch.waiting == 0
        for engine in engines:
            local.add(engine)


@on_a_loop
async def test_streams_go_on_only_where_the_fingerprint_is_equal():
    async with fleet(1, device="simulated:10", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(seed=1, max_tokens=80, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        name = await where(llm)
        other = await local.replace(name, "another model")
        await until(lambda: other in llm.fleet.replicas)
        # What begins now runs there; what was told does not go on there.
        await read(llm, TEXT, dataclasses.replace(params, max_tokens=3))
        assert not stream.done()
        assert llm.fleet.queue.dispatch.waiting == 1
        third = await local.replace(other)
        await until(lambda: third in llm.fleet.replicas)
        compare(await stream, wanted)


@on_a_loop
async def test_what_cannot_go_on_anywhere_ends_with_an_error(monkeypatch):
    monkeypatch.setattr("nanoactor.fleet.dispatch.NO_REPLICA_TIMEOUT", 1.0)
    async with fleet(1, device="simulated:10", dtype="auto") as (llm, local, _):
        params = SamplingParams.for_model(seed=1, max_tokens=200, ignore_eos=True)
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        await local.replace(await where(llm), "another model")
        with pytest.raises(ComputationFailed, match="no replica with the same model"):
            await stream
        assert llm.live == 0


@on_a_loop
async def test_a_moved_stream_waits_for_a_free_place_and_goes_first():
    changes = dict(device="simulated:10", dtype="auto", max_num_seqs=2)
    async with fleet(2, **changes) as (llm, local, _):
        params = SamplingParams.for_model(seed=1, max_tokens=60, ignore_eos=True)
        long = dataclasses.replace(params, max_tokens=200)
        ends = []

        async def run(name, params):
            await read(llm, TEXT, params)
            ends.append(name)

        first = [asyncio.ensure_future(run("moves", long)) for _ in range(4)]
        await until(lambda: sum(page.tokens_sent > 5 for page in llm.fleet.requests.values()) == 4)
        engine = await local.kill(min(local.members))
        await until(lambda: llm.fleet.queue.dispatch.waiting == 2)
        late = [asyncio.ensure_future(run("new", params)) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert llm.fleet.queue.dispatch.waiting == 4  # the new ones wait behind them
        local.add(engine)
        await asyncio.gather(*first, *late)
        assert sorted(ends[:2]) == ["moves", "moves"]


class Poisonous:
    """Kills whoever runs a certain request, a moment after it has begun there."""

    def __init__(self, local, engines, prompt):
        self.local, self.prompt, self.kills = local, prompt, 0
        self.alone_beside = []
        self.task = asyncio.ensure_future(self.watch())

    async def watch(self):
        while True:
            await asyncio.sleep(0.01)
            for name, replica in list(self.local.replicas.items()):
                for stream in replica.hub.streams:
                    if stream.has_begun and self.is_it(stream):
                        self.alone_beside.append((stream.order.is_alone, len(replica.hub.streams)))
                        self.kills += 1
                        await self.local.replace(name)
                        break

    def is_it(self, stream):
        from nanoactor.fleet.wire import bytes_to_ids

        return bytes_to_ids(stream.order.token_ids) == self.prompt


@on_a_loop
async def test_a_request_that_kills_each_replica_costs_nobody_else_anything():
    async with fleet(3, device="simulated:5", dtype="auto") as (llm, local, engines):
        asked = [
            (TEXT, SamplingParams.for_model(seed=n, max_tokens=250, ignore_eos=True))
            for n in range(12)
        ]
        wanted = await undisturbed(engines[0], asked)
        streams = asyncio.gather(*(read(llm, *ask) for ask in asked))
        await asyncio.sleep(0.2)
        poison = list(range(60, 90))
        poisonous = Poisonous(local, engines, poison)
        params = SamplingParams.for_model(seed=1, max_tokens=300, ignore_eos=True)
        with pytest.raises(PoisonRequest):
            await read(llm, {"prompt_token_ids": poison}, params)
        for found, right in zip(await streams, wanted, strict=True):
            compare(found, right)
        poisonous.task.cancel()
        assert poisonous.kills == 3, poisonous.alone_beside
        assert poisonous.alone_beside[-1] == (True, 1)
        assert llm.fleet.counts.poisoned == 1
        assert not llm.fleet.counts.lost
        # Nothing stays reserved, and nobody is suspected.
        await until(lambda: not any(r.hub.reserved_by for r in local.replicas.values()))
        assert not llm.fleet.queue.trials.waiting


async def suspected(llm, local):
    """Have the one stream be a suspect; its replicas die from outside, and at once."""
    await local.replace(await where(llm))
    await until(lambda: llm.fleet.counts.moved)
    (part,) = next(iter(llm.fleet.requests.values())).parts
    await until(lambda: part in llm.fleet.streams._running)
    return llm.fleet.streams._running[part][0].name


@on_a_loop
async def test_a_suspect_goes_on_only_where_the_fingerprint_is_equal():
    async with fleet(1, device="simulated:20", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(seed=3, max_tokens=100, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        other = await local.replace(await suspected(llm, local), "another model")
        await until(lambda: llm.fleet.queue.trials.waiting and other in llm.fleet.replicas)
        await read(llm, TEXT, dataclasses.replace(params, max_tokens=3))  # that may run there
        assert llm.fleet.queue.trials.waiting == 1
        assert local.replicas[other].hub.reserved_by is None
        await local.replace(other)
        compare(await stream, wanted)


@on_a_loop
async def test_a_suspect_for_which_no_replica_comes_ends_with_an_error(monkeypatch):
    monkeypatch.setattr("nanoactor.fleet.trial_runs.NO_REPLICA_TIMEOUT", 1.5)
    async with fleet(1, device="simulated:20", dtype="auto") as (llm, local, _):
        params = SamplingParams.for_model(seed=3, max_tokens=300, ignore_eos=True)
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        engine = await local.kill(await suspected(llm, local))
        with pytest.raises(EngineDead):
            await stream
        assert llm.live == llm.fleet.queue.trials.waiting == 0
        local.add(engine)


@on_a_loop
async def test_a_trial_that_its_replica_leaves_convicts_nobody():
    async with fleet(2, device="simulated:20", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(seed=3, max_tokens=200, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        await local.replace(await suspected(llm, local))
        await until(lambda: llm.fleet.queue.trials._trials.on_trial is not None)
        tried = llm.fleet.queue.trials._replica.name
        local.leave(tried)
        local.add(local.replicas[tried].llm)
        compare(await stream, wanted)
        assert llm.fleet.counts.poisoned == 0
        await until(lambda: not any(r.hub.reserved_by for r in local.replicas.values()))


@pytest.mark.deadly
@on_a_loop
async def test_an_engine_that_dies_in_its_replica_is_a_death():
    changes = dict(device="simulated:10", dtype="auto", placement="default", max_restarts=0)
    async with fleet(2, **changes) as (llm, local, engines):
        params = SamplingParams.for_model(seed=1, max_tokens=150, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        dead = local.replicas[await where(llm)].llm
        os.kill(dead.pids["control"], signal.SIGKILL)
        compare(await stream, wanted)
        assert vars(llm.fleet.counts) == dict(moved=1, requeued=0, lost=0, deaths=1, poisoned=0)
        assert dead.dead is not None
        engines.remove(dead)  # it has nothing to settle


@on_a_loop
async def test_a_suspect_that_kills_nothing_goes_on():
    async with fleet(2, device="simulated:5", dtype="auto") as (llm, local, engines):
        params = SamplingParams.for_model(seed=3, max_tokens=400, ignore_eos=True)
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        stream = asyncio.ensure_future(read(llm, TEXT, params))
        await local.replace(await where(llm))
        await until(lambda: llm.fleet.counts.moved == 1)
        (part,) = next(iter(llm.fleet.requests.values())).parts
        await until(lambda: part in llm.fleet.streams._running)
        await local.replace(llm.fleet.streams._running[part][0].name)  # from outside, and at once
        compare(await stream, wanted)
        assert llm.fleet.counts.poisoned == 0


@on_a_loop
async def test_errors_are_those_of_an_engine():
    async with fleet(2, max_model_len=256) as (llm, _, engines):

        async def error(one, prompt, params):
            try:
                await read(one, prompt, params)
            except Exception as error:
                return type(error), str(error)
            return None

        short = SamplingParams.for_model(max_tokens=4)
        bad = [
            ({"prompt_token_ids": [10**6]}, short),
            ({"prompt_token_ids": [5] * 300}, short),
            ("a " * 5000, short),
            (TEXT, SamplingParams.for_model(max_tokens=1000)),
            ("", short),
            ([{"role": "nobody", "content": 5}], short),
            (TEXT, SamplingParams.for_model(structured_outputs=StructuredOutputsParams(regex="("))),
            (TEXT, dataclasses.replace(short, stop_token_ids=[10**6])),
            (CHAT, SamplingParams.for_model(logprobs=1000)),
        ]
        for prompt, params in bad:
            found = await error(llm, prompt, params)
            wanted = await error(engines[0], prompt, params)
            assert found == wanted
            assert found is not None
            assert issubclass(found[0], InvalidRequest)
        with pytest.raises(InvalidRequest, match="beam_search"):
            await llm.beam_search(TEXT)
        with pytest.raises(InvalidRequest, match="so_far"):
            llm.submit([TEXT], short, so_far=OutputSoFar())
        assert llm.live == 0


@on_a_loop
async def test_where_all_are_full_is_told_and_one_that_is_full_is_left_alone():
    changes = dict(device="simulated:20", dtype="auto", max_num_seqs=1, max_waiting_requests=1)
    async with fleet(2, **changes) as (llm, _, _engines):
        params = SamplingParams.for_model(max_tokens=400, ignore_eos=True)
        streams = []
        for _ in range(4):  # the second of each replica waits there
            streams.append(asyncio.ensure_future(read(llm, TEXT, params)))
            await until(lambda: llm.live == len(streams) == len(llm.fleet.streams._running))
            if len(streams) == 2:  # those that run do not wait any more, also for their replicas
                await until(lambda: all(page.tokens_sent for page in llm.fleet.requests.values()))
        assert all(r.state.is_full for r in llm.fleet.replicas.values())
        with pytest.raises(EngineOverloaded, match="all 2 replicas are full"):
            await read(llm, TEXT, params)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


@on_a_loop
async def test_a_slow_reader_costs_its_own_text_alone():
    async with fleet(1, device="simulated:1", dtype="auto") as (llm, local, _):
        params = SamplingParams.for_model(seed=1, max_tokens=400, ignore_eos=True)
        params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
        slow = llm.generate(TEXT, params)
        await anext(slow)  # and then nothing for long
        for _ in range(3):
            await read(llm, TEXT, params)
        (replica,) = local.replicas.values()
        assert not replica.hub.streams  # the replica has long told all of it
        outputs = [output async for output in slow]
        assert len(outputs) <= 2  # merged
        assert outputs[-1].finished


@on_a_loop
async def test_two_ingresses_share_replicas_and_what_one_reserves():
    async with fleet(2, device="simulated:10", dtype="auto") as (one, local, engines):
        params = SamplingParams.for_model(seed=3, max_tokens=120, ignore_eos=True)
        asked = [(TEXT, dataclasses.replace(params, seed=seed, max_tokens=60)) for seed in range(6)]
        (wanted,) = await undisturbed(engines[0], [(TEXT, params)])
        right = await undisturbed(engines[0], asked)
        async with FleetLLM(engines[0].config, local, silence=5.0) as two:
            await until(lambda: len(two.fleet.replicas) == 2)
            stream = asyncio.ensure_future(read(one, TEXT, params))
            await local.replace(await suspected(one, local))
            await until(lambda: one.fleet.queue.trials._trials.on_trial is not None)
            tried = one.fleet.queue.trials._replica.name
            # What the other one sends meanwhile is answered, and not alongside the suspect.
            found = asyncio.ensure_future(undisturbed(two, asked))
            await until(lambda: two.fleet.streams)
            if local.replicas[tried].hub.reserved_by:
                assert all(s.order.is_alone for s in local.replicas[tried].hub.streams)
            for told, other in zip(await found, right, strict=True):
                compare(told, other)
            compare(await stream, wanted)
            await until(lambda: not any(r.hub.reserved_by for r in local.replicas.values()))
        # An ingress that is gone holds nothing, and what it ran is aborted.
        await until(lambda: all(len(r.hub.links) == 1 for r in local.replicas.values()))


@on_a_loop
async def test_an_ingress_that_is_gone_gives_back_what_it_had():
    async with fleet(1, device="simulated:10", dtype="auto") as (one, local, engines):
        two = await FleetLLM(engines[0].config, local).start()
        (replica,) = local.replicas.values()
        stream = asyncio.ensure_future(read(two, TEXT, SamplingParams.for_model(max_tokens=400)))
        await until(lambda: replica.hub.streams)
        link = next(iter(two.fleet.replicas.values())).link
        link.send(Reserve(is_wanted=True))
        await until(lambda: replica.hub.reserved_by == link.name)
        await two.close()
        with pytest.raises(EngineClosed):
            await stream
        await until(lambda: not replica.hub.streams and replica.hub.reserved_by is None)
        await read(one, TEXT, SamplingParams.for_model(max_tokens=3))
