"""The runner's thread, and the device that only takes time."""

import asyncio
import threading
import time

import pytest

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import InvalidConfig
from nanoactor.models.errors import NotEnoughMemory
from nanoactor.runner.executor import DeviceExecutor
from nanoactor.runner.steps.launcher import StepLauncher
from tests.engine.harness import collect, engine, greedy, ids, settled
from tests.models.checkpoints import make_checkpoint
from tests.tracing.complete import complete_trace


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory)
    return directory


def test_one_thread_loads_and_computes(checkpoint, monkeypatch):
    """OpenMP has a pool for each thread that computes: with two it would hardly spin."""
    threads = set()
    methods = (DeviceExecutor, "__init__"), (StepLauncher, "launch"), (StepLauncher, "collect")
    for owner, name in methods:
        original = getattr(owner, name)

        def noted(self, *arguments, original=original):
            threads.add(threading.current_thread().name)
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    async def main():
        async with engine(checkpoint, placement="single") as llm:
            await collect(llm, ids([1, 2, 3]), greedy(5))

    asyncio.run(main())
    assert threads == {"device"}


def test_a_simulated_device_keeps_its_own_time():
    async def main():
        async with AsyncLLM("demo", device="simulated:5", max_model_len=256) as llm:
            params = SamplingParams.for_model(max_tokens=40, ignore_eos=True, seed=1)
            outputs = await asyncio.gather(
                *(collect(llm, ids([n + 3] * 9), params) for n in range(3))
            )
            assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
            figures = (await settled(llm))["runner.0"]["actor"]
            assert figures["busy_seconds"] == pytest.approx(0.005 * figures["steps_done"])
            assert figures["steps"] == figures["steps_done"] >= 40

    asyncio.run(main())


@pytest.mark.parametrize(
    "device", ["simulated", "simulated:", "simulated:0", "simulated:-1", "simulated:x"]
)
def test_a_simulated_device_needs_a_step_time(device):
    with pytest.raises(InvalidConfig, match="write 'simulated:5'"):
        AsyncLLM("demo", device=device)


def test_a_simulated_device_too_holds_one_sequence_at_least():
    async def main():
        async with AsyncLLM("demo", device="simulated:1", num_kv_blocks=2, max_model_len=256):
            pass

    with pytest.raises(NotEnoughMemory, match="needs 16 blocks"):
        asyncio.run(main())


def test_a_hogged_loop_does_not_hold_up_the_device():
    """Counts, not times: while the user's loop is blocked the device goes on, and not only with
    what was under way."""

    async def main():
        async with AsyncLLM("demo", device="simulated:2", max_model_len=1024) as llm:
            params = SamplingParams.for_model(max_tokens=900, ignore_eos=True, seed=1)
            stream = llm.generate(ids([5] * 9), params)
            await anext(stream)
            begin = time.monotonic_ns()
            threading.Event().wait(0.5)  # nothing else runs on this loop
            end = time.monotonic_ns()
            trace = await complete_trace(llm, {"runner.0 device"}, begin)
            await stream.aclose()
        (device,) = [
            track
            for node in trace.nodes
            for track in node.tracks
            if track.track == "runner.0 device"
        ]
        meanwhile = {n for _, n, _, b, e in device.spans.tolist() if begin < b and e < end}
        assert len(meanwhile) > 10

    asyncio.run(main())
