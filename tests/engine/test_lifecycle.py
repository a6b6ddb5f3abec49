"""Starting, ending and dying: nothing is left behind, nobody waits for ever."""

import asyncio
import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from nanoactor import LLM, AsyncLLM, SamplingParams
from nanoactor.errors import EngineClosed, EngineDead
from nanoactor.options.config import EngineConfig
from nanoactor.placement.system_options import system_options
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.runtime.errors import NotUsableHere
from tests.conftest import children, descriptors, survivors
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy, settled
from tests.promises import Delay, check_promise

LONG = SamplingParams.for_model(max_tokens=900, ignore_eos=True)


def text_engine(placement="default", **changes):
    return engine(DEMO, skip_tokenizer_init=False, placement=placement, **changes)


def test_control_processes_stay_light():
    """No torch, no transformers outside the runner; no tokenizer and no server code in it."""

    async def main():
        async with text_engine(max_num_seqs=4) as llm:
            await collect(llm, "ROMEO:", greedy(5))
            maps = {}
            for name, pid in llm.pids.items():
                with open(f"/proc/{pid}/maps") as file:
                    maps[name] = file.read()
            return maps

    maps = asyncio.run(main())
    assert set(maps) == {"tokenizer.0", "control", "detokenizer", "grammar", "runner.0"}
    for name, mapped in maps.items():
        assert ("libtorch" in mapped) == (name == "runner.0"), name
        if name != "grammar":  # it reads the vocabulary when it has nothing else to do
            assert ("tokenizers" in mapped) == (name in ("tokenizer.0", "detokenizer")), name
        assert "_http_parser" not in mapped, name  # aiohttp


def test_an_idle_engine_uses_no_processor():
    def ticks(pid):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def main():
        async with text_engine(max_num_seqs=4) as llm:
            await collect(llm, "ROMEO:", greedy(5))
            await settled(llm)
            shares = []
            while len(shares) < 5:  # an end of work may reach into the first
                began, before = time.monotonic(), sum(ticks(pid) for pid in llm.pids.values())
                await asyncio.sleep(1.0)
                used = sum(ticks(pid) for pid in llm.pids.values()) - before
                used /= os.sysconf("SC_CLK_TCK")
                shares.append(used / (time.monotonic() - began))
                if shares[-1] < 0.05:
                    return
            raise AssertionError(f"busy shares {shares}")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["tokenizer.0", "control", "detokenizer", "grammar", "runner.0"])
def test_a_death_that_is_not_made_good_reaches_every_request_within_100_ms(name):
    async def death():
        options = dict(device="simulated:2", max_num_seqs=4, max_restarts=0)
        async with AsyncLLM("demo", **options) as llm:
            streams = [llm.generate("ROMEO:", LONG) for _ in range(6)]
            await asyncio.gather(*(anext(stream) for stream in streams[:4]))
            waiting = [asyncio.ensure_future(exhaust(stream)) for stream in streams]
            await asyncio.sleep(0.02)
            pidfd = os.pidfd_open(llm.pids[name])
            os.kill(llm.pids[name], signal.SIGKILL)
            # A process that is nice dies when others leave it the time for that.
            await asyncio.to_thread(select.select, [pidfd], [], [])
            os.close(pidfd)
            async with Delay() as delay:
                results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(result, EngineDead) for result in results), results
            assert all(name in str(result) for result in results)
            with pytest.raises(EngineDead, match=name):
                await collect(llm, "ROMEO:")
        assert not children()
        return delay

    check_promise(death)


async def exhaust(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("engines", "device"), [(5, "simulated:1"), pytest.param(20, "cpu", marks=pytest.mark.long)]
)
def test_engines_grow_neither_memory_nor_descriptors(engines, device):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    async def once():
        async with AsyncLLM("demo", device=device, max_num_seqs=4) as llm:
            await collect(llm, "ROMEO:", greedy(3))

    async def main():
        sizes = []
        for _ in range(engines):
            await once()
            sizes.append((resident(), descriptors(), threading.active_count()))
            assert not children()
        assert sizes[-1][1:] == sizes[0][1:], sizes
        assert sizes[-1][0] - sizes[engines // 4 + 1][0] < 4 << 20, sizes

    asyncio.run(main())


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_closing_an_iterator_aborts_its_request(moment):
    async def main():
        async with text_engine(placement="single") as llm:
            stream = llm.generate("ROMEO:", LONG)
            for _ in range(moment):
                await anext(stream)
            await stream.aclose()
            task = asyncio.ensure_future(collect(llm, "JULIET:", LONG))
            await asyncio.sleep(0.02 * moment)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_an_exception_in_the_consumer_aborts_and_leaves_the_engine_serving():
    async def main():
        async with text_engine(placement="single") as llm:
            with pytest.raises(RuntimeError, match="consumer"):
                async for _ in llm.generate("ROMEO:", LONG):
                    raise RuntimeError("consumer")
            assert (await collect(llm, "ROMEO:", greedy(3))).finished

    asyncio.run(main())


def test_abort_by_id_is_acknowledged_and_the_stream_says_so():
    async def main():
        async with text_engine(device="simulated:5") as llm:
            task = asyncio.ensure_future(collect(llm, "ROMEO:", LONG, request_id="mine"))
            await asyncio.sleep(0.2)
            with pytest.raises(ValueError, match="mine"):
                await collect(llm, "ROMEO:", greedy(3), request_id="mine")
            await llm.abort("mine")
            known = llm._frontend.journal.find_by_id("mine")
            assert known is None, "it returns when nothing follows"
            output = await asyncio.wait_for(task, 10)
            assert output.outputs[0].finish_reason == "abort"
            await llm.abort("mine")
            await llm.abort("unknown")

    asyncio.run(main())


def test_a_closed_engine_says_so():
    async def main():
        llm = AsyncLLM("demo", placement="single", max_num_seqs=4)
        with pytest.raises(EngineClosed, match="start"):
            await collect(llm, "ROMEO:")
        await llm.start()
        waiting = asyncio.ensure_future(collect(llm, "ROMEO:", LONG))
        await asyncio.sleep(0.05)
        await llm.close()
        await llm.close()
        with pytest.raises(EngineClosed, match="closed"):
            await waiting
        with pytest.raises(EngineClosed, match="closed"):
            await collect(llm, "ROMEO:")

    asyncio.run(main())


def test_another_loop_is_refused_and_the_engine_goes_on():
    async def main():
        async with text_engine(placement="single") as llm:

            def elsewhere():
                with pytest.raises(NotUsableHere, match="event loop"):
                    asyncio.run(collect(llm, "ROMEO:"))

            await asyncio.to_thread(elsewhere)
            assert (await collect(llm, "ROMEO:", greedy(3))).finished

    asyncio.run(main())


def test_a_slow_consumer_gets_merged_deltas_and_holds_up_nobody():
    async def main():
        async with text_engine(device="simulated:2") as llm:
            from nanoactor import RequestOutputKind

            same = SamplingParams.for_model(seed=1, max_tokens=300, ignore_eos=True)
            delta = dataclasses.replace(same, output_kind=RequestOutputKind.DELTA)
            slow = llm.generate("ROMEO:", delta)
            pieces = [await anext(slow)]
            whole = await collect(llm, "ROMEO:", same)
            await settled(llm)
            async for output in slow:
                pieces.append(output)
            text = "".join(piece.outputs[0].text for piece in pieces)
            assert text == whole.outputs[0].text
            assert sum(len(p.outputs[0].token_ids) for p in pieces) == 300
            assert len(pieces) == 2

    asyncio.run(main())


def test_metrics_tell_the_queue_from_the_prompt():
    """With one place the second request waits until the first has computed its 20 tokens."""

    async def main():
        options = dict(device="simulated:3", max_num_seqs=1)
        async with text_engine("single", **options) as llm:
            first = asyncio.ensure_future(collect(llm, "ROMEO:", greedy(20)))
            second = asyncio.ensure_future(collect(llm, "JULIET:", greedy(5)))
            return (await first).metrics, (await second).metrics

    first, second = asyncio.run(main())
    for times in (first, second):
        assert times.arrival_time <= times.first_scheduled_time < times.first_token_time
    assert second.first_scheduled_time - first.first_scheduled_time >= 20 * 0.003
    assert second.first_scheduled_time - second.arrival_time >= 19 * 0.003


def test_a_request_that_ends_in_the_queue_was_never_scheduled():
    async def main():
        async with text_engine("single", device="simulated:3", max_num_seqs=1) as llm:
            first = asyncio.ensure_future(collect(llm, "ROMEO:", greedy(20)))
            second = asyncio.ensure_future(collect(llm, "JULIET:", greedy(5), request_id="second"))
            await asyncio.sleep(0)
            await llm.abort("second")
            await first
            return (await second).metrics

    assert asyncio.run(main()).first_scheduled_time is None


def test_the_blocking_front_works_in_a_thread_and_inside_a_running_loop(capsys):
    same = SamplingParams.for_model(seed=1, max_tokens=8, ignore_eos=True)
    with LLM("demo", device="simulated:1", max_num_seqs=4) as llm:
        outputs = llm.generate(["ROMEO:", {"prompt_token_ids": [5, 6]}], same)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8]
        assert "tok/s" in capsys.readouterr().err
        answer = llm.chat([{"role": "user", "content": "Who art thou?"}], greedy(8), False)
        assert answer[0].outputs[0].token_ids

        async def inside():
            return llm.generate("ROMEO:", same, use_tqdm=False)

        assert asyncio.run(inside())[0].outputs[0].text == outputs[0].outputs[0].text
        with pytest.raises(ValueError, match="empty"):
            llm.generate(["ROMEO:", ""], LONG, use_tqdm=False)
        assert llm.generate("ROMEO:", greedy(2), use_tqdm=False)
    assert not children()
    with pytest.raises(EngineClosed):
        llm.generate("ROMEO:")


def test_an_engine_starts_once_and_may_be_closed_while_it_starts():
    async def main():
        llm = AsyncLLM("demo", device="simulated:1", num_kv_blocks=1)
        with pytest.raises(ValueError, match="one sequence"):
            await llm.start()
        with pytest.raises(EngineClosed, match="can be started only once"):
            await llm.start()
        await llm.close()
        assert not children()
        for delay in (0.0, 0.5):
            llm = AsyncLLM("demo", device="simulated:1", max_num_seqs=4)
            start = asyncio.ensure_future(llm.start())
            await asyncio.sleep(delay)
            was_up = start.done()  # a quick machine starts it in less than half a second
            await llm.close()
            if was_up:
                await start
            else:
                with pytest.raises(EngineClosed):
                    await start
            assert not was_up or delay == 0.5
            assert not children()
        start = asyncio.ensure_future(AsyncLLM("demo", max_num_seqs=4).start())
        await asyncio.sleep(0.3)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not children()

    asyncio.run(main())


def test_a_batch_larger_than_the_queue_waits_outside():
    options = dict(device="simulated:1", max_num_seqs=2, placement="single")
    with LLM("demo", **options, max_waiting_requests=3, max_waiting_tokens=60) as llm:
        outputs = llm.generate(["ROMEO: what light is it?"] * 12, greedy(4), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 12


def test_threads_may_close_the_blocking_front_together_and_forks_are_refused():
    llm = LLM("demo", device="simulated:1", max_num_seqs=2)
    pid = os.fork()
    if pid == 0:
        try:
            llm.close()
            llm.generate("ROMEO:")
        except NotUsableHere:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert llm.generate("ROMEO:", greedy(2), use_tqdm=False)
    errors = []

    def generate():
        try:
            llm.generate("ROMEO:", LONG, use_tqdm=False)
        except EngineClosed as error:
            errors.append(error)

    running = threading.Thread(target=generate)
    running.start()
    time.sleep(0.1)
    closers = [threading.Thread(target=llm.close) for _ in range(4)]
    for thread in closers:
        thread.start()
    for thread in [*closers, running]:
        thread.join(60)
        assert not thread.is_alive()
    assert errors
    assert not children()


LOADING = """
import os, signal, threading, time
from nanoactor import LLM
threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    LLM("demo", max_num_seqs=2)
except KeyboardInterrupt:
    task = "/proc/self/task"
    kids = [c for t in os.listdir(task) for c in open(f"{task}/{t}/children").read().split()]
    print("left:", *kids)
"""


def test_ctrl_c_while_the_blocking_front_loads_leaves_nothing():
    done = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "left:", done
    assert "Task was destroyed" not in done.stderr


SCRIPT = """
import asyncio, sys, time
from nanoactor import AsyncLLM, SamplingParams
async def main():
    async with AsyncLLM("demo", device=sys.argv[2], max_num_seqs=4) as llm:
        told = False
        params = SamplingParams.for_model(max_tokens=900, ignore_eos=True)
        async for _ in llm.generate("ROMEO:", params):
            if not told:  # the first tokens may come together
                print(*llm.pids.values(), flush=True)
            told = True
            if sys.argv[1] == "raise":
                raise RuntimeError("in the consumer")
asyncio.run(main())
"""  # no __main__ guard: none is needed
LATER_WAYS = "SIGTERM", "exit", "raise"


@pytest.mark.parametrize(
    "way",
    ["SIGINT", "SIGKILL", *(pytest.param(w, marks=pytest.mark.long) for w in LATER_WAYS)],
)
def test_no_process_survives_its_user(way, tmp_path):
    script = tmp_path / "user.py"
    short = SCRIPT.replace("max_tokens=900", "max_tokens=30")
    script.write_text(short if way == "exit" else SCRIPT)
    device = "cpu" if way == "SIGKILL" else "simulated:1"
    command = [sys.executable, script, way, device]
    user = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in user.stdout.readline().split()]
    assert len(pids) == 5, user.communicate()[1]
    if way.startswith("SIG"):
        user.send_signal(getattr(signal, way))
    user.wait(60)
    assert survivors(pids) == []
    _, errors = user.communicate(timeout=60)
    assert (user.returncode == 0) == (way == "exit"), errors
    assert "resource_tracker" not in errors


@pytest.mark.parametrize(("cores", "awake"), [(2, 0.0), (11, 0.0), (12, 3.0), (None, 0.0)])
def test_loops_stay_awake_where_there_are_two_cores_for_each_process(monkeypatch, cores, awake):
    """Five processes and the user's own; None: as many as this machine has, and told not to."""
    if cores:
        monkeypatch.setattr("nanoactor.placement.system_options.usable_cores", lambda: cores)
    config = EngineConfig("demo", **({} if cores else {"awake_ms": 0}))
    assert system_options(config, 6).awake_seconds == awake * 1e-3


def test_a_request_rouses_those_it_will_pass_and_they_sleep_again():
    """The user's process too, which the runner rouses. All are asked until it is so, however late
    a busy machine lets them hear of it."""
    names = {"frontend", "tokenizer.0", "scheduler", "detokenizer", "runner.0"}

    async def counts(llm, key):
        found = {}
        while not names <= found.keys():
            found = await llm.statistics()
        return {name: found[name]["node"][key] for name in names}

    async def main():
        async with text_engine(device="simulated:2", max_num_seqs=4, awake_ms=5) as llm:
            before = await counts(llm, "roused")
            output = await collect(llm, "ROMEO:", greedy(5))
            assert output.outputs[0].finish_reason == "length"
            roused = before
            while any(roused[name] == before[name] for name in names):
                roused = await counts(llm, "roused")
            looks = {}
            while (now := await counts(llm, "looks")) != looks:
                looks = now
                await asyncio.sleep(0.3)

    asyncio.run(main())


def test_tokens_under_a_grammar_rouse_nobody():
    """Each is computed as a prompt is, and is nobody's first."""

    async def roused(llm):
        return (await llm.statistics())["scheduler"]["node"]["roused"]

    async def main():
        async with text_engine(device="simulated:2", max_num_seqs=4, awake_ms=0.5) as llm:
            before = await roused(llm)
            wanted = StructuredOutputsParams(regex="[a-z]{400}")
            params = SamplingParams.for_model(max_tokens=60, structured_outputs=wanted)
            output = await collect(llm, "ROMEO:", params)
            assert len(output.outputs[0].token_ids) == 60
            assert await roused(llm) - before <= 3

    asyncio.run(main())
