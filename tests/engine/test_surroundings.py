"""What surrounds an engine: its errors' common base, other loops, users who drop it, odd names."""

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nanoactor
import nanoactor.models.errors as model_errors
import nanoactor.runtime.errors as runtime_errors
from nanoactor import LLM, AsyncLLM, SamplingParams
from nanoactor.errors import (
    EngineClosed,
    NanoactorError,
    NotEnoughMemory,
    StartupFailed,
    UnsupportedPlatform,
    translated,
)
from tests.conftest import check_descriptors, children, descriptors
from tests.engine.harness import collect

pytestmark = pytest.mark.drawn(2)

FAST = dict(device="simulated:1", max_num_seqs=4)
IN_ONE = {**FAST, "placement": "single"}
FEW, LONG = (
    SamplingParams.for_model(max_tokens=3),
    SamplingParams.for_model(max_tokens=900, ignore_eos=True),
)
ERRORS = [
    cls
    for module in (model_errors, runtime_errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, model_errors.ModelError | runtime_errors.RuntimeFault)
]


@pytest.mark.parametrize("cls", ERRORS)
def test_whatever_leaves_the_engine_has_one_base_and_is_what_it_was(cls):
    error = cls("why")
    error.__cause__ = KeyError("deeper")
    made = translated(error)
    assert isinstance(made, NanoactorError)
    known = next(parent for parent in cls.__mro__ if parent in type(made).__mro__)
    assert known not in (Exception, ValueError, object)
    assert (str(made), made.__cause__) == (str(error), error.__cause__)
    assert translated(made) is made


@pytest.mark.parametrize(
    ("options", "cls"),
    [
        (dict(model="demo", device="tpu"), model_errors.UnsupportedModel),
        (dict(model="demo", num_kv_blocks=1), model_errors.NotEnoughMemory),
        (dict(model="./nowhere"), model_errors.ModelError),
        (dict(model="demo", device="simulated:1", start_timeout=0.001), StartupFailed),
    ],
)
def test_a_start_that_fails_raises_the_one_base(options, cls):
    async def main():
        with pytest.raises(NanoactorError) as caught:
            await AsyncLLM(**options).start()
        assert isinstance(caught.value, cls)

    asyncio.run(main())
    assert not children()


def test_an_engine_may_be_closed_from_another_loop():
    async def main():
        llm = AsyncLLM("demo", **FAST)
        await llm.start()
        waiting = asyncio.ensure_future(collect(llm, "a", LONG))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(lambda: asyncio.run(llm.close()))
        with pytest.raises(EngineClosed):
            await waiting

    before = descriptors()
    asyncio.run(main())
    llm = AsyncLLM("demo", **FAST)
    asyncio.run(llm.start())
    assert children()
    asyncio.run(llm.close())
    assert not children()
    assert descriptors() == before


def test_an_engine_that_is_dropped_ends_with_a_warning():
    def drop():
        llm = LLM("demo", **FAST)
        assert llm.generate("a", FEW, use_tqdm=False)

    async def main():
        llm = AsyncLLM("demo", **FAST)
        await llm.start()
        assert await collect(llm, "a", FEW)
        waste = [llm]
        del llm
        with pytest.warns(ResourceWarning, match="use `async with`"):
            waste.clear()
        await until_gone()

    asyncio.run(main())
    with pytest.warns(ResourceWarning, match="call close"):
        drop()
    asyncio.run(until_gone())
    gc.collect()
    before = descriptors()
    asyncio.run(main())
    gc.collect()
    check_descriptors(before)


async def until_gone():
    deadline = time.monotonic() + 30
    while children():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_requests_keep_their_engine_alive():
    async def main():
        llm = AsyncLLM("demo", **IN_ONE)
        await llm.start()
        (request,) = llm.submit(["a"], SamplingParams.for_model(max_tokens=40, ignore_eos=True))
        stopping = llm.close
        del llm
        gc.collect()
        outputs = [output async for output in request]
        assert outputs[-1].finished
        await stopping()

    asyncio.run(main())


def test_names_of_requests_do_not_collide():
    async def main():
        async with AsyncLLM("demo", **IN_ONE) as llm:
            one = collect(llm, "a", FEW)
            mine = await one
            number = int(mine.request_id.rpartition("-")[2])
            theirs = f"request-{number + 1}", mine.request_id
            named = [asyncio.ensure_future(collect(llm, "a", LONG, request_id=n)) for n in theirs]
            await asyncio.sleep(0.05)
            others = [asyncio.ensure_future(collect(llm, "a", LONG)) for _ in range(3)]
            await asyncio.sleep(0.05)
            for name in theirs:
                await llm.abort(name)
            ended = [await task for task in named]
            assert [o.outputs[0].finish_reason for o in ended] == ["abort", "abort"]
            ids = {(await task).request_id for task in others}
            assert len(ids) == 3
            assert not ids & set(theirs)

    asyncio.run(main())


def test_looking_for_a_name_costs_no_look_at_the_others():
    """A thousand living requests, each with a name: finding one asks for no other's."""

    async def main():
        async with AsyncLLM("demo", **IN_ONE) as llm:
            frontend, asked = llm._require_frontend(), 0

            class Named(str):
                def __eq__(self, other):
                    nonlocal asked
                    asked += 1
                    return str.__eq__(self, other)

                __hash__ = str.__hash__

            names = [Named(f"name-{n}") for n in range(1000)]
            streams = [llm.generate("a", FEW, request_id=name) for name in names]
            tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0)
            assert frontend.journal.find_by_id("name-500") is not None
            assert asked < 20, f"{asked} comparisons for 1000 names"
            await asyncio.gather(*tasks)
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def test_a_path_that_is_no_text_does_not_keep_an_engine_from_starting(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])

    async def main():
        async with AsyncLLM("demo", **FAST) as llm:
            messages = [{"role": "user", "content": "a"}]
            assert (await collect(llm, messages, FEW)).finished

    asyncio.run(main())


def test_a_frozen_program_is_refused_and_never_starts_itself_again(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(UnsupportedPlatform, match="frozen into a bundle"):
        asyncio.run(AsyncLLM("demo", **FAST).start())
    assert not children()


DELETED = """
import asyncio, os, shutil, signal, sys
from nanoactor import AsyncLLM, SamplingParams

async def text(llm):
    async for output in llm.generate("ROMEO:", SamplingParams(max_tokens=8, seed=1)):
        pass
    return output.outputs[0].text

async def main():
    async with AsyncLLM("demo", max_num_seqs=4, max_model_len=1024, num_kv_blocks=64) as llm:
        before = await text(llm)
        shutil.rmtree(os.getcwd())
        os.kill(llm.pids["runner.0"], signal.SIGKILL)
        assert await text(llm) == before
        assert sum(llm.restarts[0].values()) == 1

asyncio.run(main())
"""


def test_the_working_directory_may_be_deleted_under_a_running_engine(tmp_path):
    """As by a deployment that swaps directories: a process starts again elsewhere."""
    root = str(Path(__file__).parents[2])
    place = tmp_path / "gone"
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", DELETED]
    subprocess.run(command, cwd=place, env=environment, check=True, timeout=280)


def test_a_cache_beyond_memory_is_refused_with_the_arithmetic():
    """It would start, and be killed when it fills."""
    with pytest.raises(
        NotEnoughMemory, match=r"num_kv_blocks 1000000000 is .* blocks of .* MiB free"
    ):
        LLM("demo", num_kv_blocks=10**9)
    assert not children()


ELSEWHERE = """
import builtins, signal, sys

sys.platform = "win32"
del signal.SIGHUP, signal.SIGKILL
import_ = builtins.__import__

def without(name, *args, **kwargs):
    if name in {"fcntl", "resource", "pwd", "termios", "uvloop"}:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return import_(name, *args, **kwargs)

builtins.__import__ = without
"""


def test_other_platforms_get_a_sentence():
    """As on Windows, where some modules and signals do not exist."""
    code = ELSEWHERE + "import nanoactor\nprint(nanoactor.__version__)\nfrom nanoactor import "
    for name in ("LLM", "AsyncLLM"):
        command = [sys.executable, "-c", code + name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.startswith(nanoactor.RELEASE)
        assert "UnsupportedPlatform: nanoactor runs only on Linux" in done.stderr
    command = [sys.executable, "-c", ELSEWHERE + "from nanoactor.__main__ import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.startswith(
        "nanoactor: nanoactor runs only on Linux, but this machine runs win32"
    )
    assert done.returncode == 1
