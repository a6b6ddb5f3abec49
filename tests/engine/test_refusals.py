"""What the machine refuses in the middle of a request ends that request with its cause: it is
nobody's fault, convicts nobody, and ends nothing else.

Root is above some of the limits, so refusals are injected where the engine asks the machine.
"""

import asyncio
import errno
import os
import signal
import subprocess
import threading

import pytest

from nanoactor import AsyncLLM, OutOfResources, PoisonRequest, SamplingParams
from nanoactor.grammar import compiling, matcher
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.text import prompt_encoder, renderer
from nanoactor.text.tokenizer import TextEncoder
from tests.conftest import children
from tests.engine.harness import collect, settled

NO_THREAD = RuntimeError("can't start new thread")
NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files", "/some/path")
NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
CHAT = [{"role": "user", "content": "To be"}]
PLAIN = SamplingParams.for_model(max_tokens=4, ignore_eos=True)
CONSTRAINED = SamplingParams.for_model(
    max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]{9}")
)


def engine(**options):
    shape = dict(device="simulated:1", max_model_len=256, placement="single")
    return AsyncLLM("demo", **shape | options)


def refusing(error):
    def refuse(*args, **kwargs):
        raise error

    return refuse


async def refused_then_served(prompt, params, patch, unpatch, words):
    """While the machine refuses, the request ends with its cause, and others go on; once it no
    longer does, the same request is served."""
    async with engine() as llm:
        await collect(llm, prompt, params)
        stranger = asyncio.ensure_future(
            collect(llm, "Or not", SamplingParams.for_model(max_tokens=100, ignore_eos=True))
        )
        await asyncio.sleep(0.005)
        for _ in range(10):  # they do not add up
            patch(llm)
            with pytest.raises(OutOfResources, match=words) as caught:
                await collect(llm, prompt, params)
            assert "/some/path" not in str(caught.value)
            unpatch()
        assert (await collect(llm, prompt, params)).outputs[0].token_ids
        assert len((await stranger).outputs[0].token_ids) == 100
        await settled(llm)
        assert llm.restarts == ({}, 0.0)
        assert llm.dead is None


@pytest.mark.parametrize("error", [MemoryError(), NO_DESCRIPTOR])
def test_memory_and_descriptors_for_a_prompt(monkeypatch, error):
    def patch(llm):
        monkeypatch.setattr(TextEncoder, "encode", refusing(error))

    words = "memory|Too many open files"
    asyncio.run(refused_then_served("To be", PLAIN, patch, monkeypatch.undo, words))


def test_a_thread_for_a_long_prompt(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "long texts":
            raise NO_THREAD
        start(thread)

    async def main():
        async with engine() as llm:
            monkeypatch.setattr(prompt_encoder, "LONG_TEXT", 100)
            monkeypatch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OutOfResources, match="new thread"):
                await collect(llm, "word " * 30, PLAIN)
            assert await collect(llm, "short", PLAIN)
            await settled(llm)

    asyncio.run(main())


@pytest.mark.parametrize("error", [NO_PROCESS, NO_DESCRIPTOR])
def test_a_process_for_a_template(monkeypatch, error):
    popen = subprocess.Popen

    def patch(llm):
        templates = llm._system.actor("tokenizer.0")._jobs._templates
        templates._renderer.end()
        monkeypatch.setattr(renderer.subprocess, "Popen", refusing(error))

    assert popen is subprocess.Popen
    words = "temporarily unavailable|Too many open files"
    asyncio.run(refused_then_served(CHAT, PLAIN, patch, monkeypatch.undo, words))


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (matcher, "_on_deep_stack", NO_THREAD),
        (matcher, "_on_deep_stack", MemoryError()),
        (compiling, "_resident_bytes", NO_DESCRIPTOR),
    ],
)
def test_threads_memory_and_descriptors_for_a_grammar(monkeypatch, where, name, error):
    numbers = iter(range(1000))

    def patch(llm):
        monkeypatch.setattr(where, name, refusing(error))

    async def main():
        async with engine() as llm:
            for _ in range(10):
                patch(llm)
                regex = StructuredOutputsParams(regex=f"[ab]{{9}}{next(numbers)}")
                params = SamplingParams.for_model(max_tokens=4, structured_outputs=regex)
                with pytest.raises(OutOfResources, match="thread|memory|Too many open files"):
                    await collect(llm, "To be", params)
                monkeypatch.undo()
            assert (await collect(llm, "To be", CONSTRAINED)).outputs[0].token_ids
            assert (await collect(llm, "To be", PLAIN)).outputs[0].token_ids
            await settled(llm)

    asyncio.run(main())


@pytest.mark.deadly
def test_a_process_that_the_kernel_ends_convicts_nobody():
    """As where memory is short: one SIGKILL after the other, at the same place of a slow stream."""

    async def main():
        config = dict(device="simulated:250", placement="default", max_restarts=4)
        async with engine(**config) as llm:
            params = SamplingParams.for_model(max_tokens=10, ignore_eos=True)
            slow = asyncio.ensure_future(collect(llm, "To be", params))
            for name in ("tokenizer.0", "detokenizer", "tokenizer.0"):
                await asyncio.sleep(0.6)
                os.kill(llm.pids[name], signal.SIGKILL)
                while not llm.recovering:
                    await asyncio.sleep(0.001)
                while llm.recovering:
                    await asyncio.sleep(0.01)
            late = asyncio.ensure_future(collect(llm, "Or not", params))
            try:
                assert len((await slow).outputs[0].token_ids) == 10
            except PoisonRequest as error:
                pytest.fail(str(error))
            assert len((await late).outputs[0].token_ids) == 10
            assert llm._frontend._readmission.trials == 0
            await settled(llm)

    asyncio.run(main())
    assert not children()


@pytest.mark.deadly
def test_a_tokenizers_crashes_do_not_blame_streams_that_it_tokenized_long_ago():
    async def main():
        config = dict(device="simulated:100", placement="default", max_restarts=4)
        async with engine(**config) as llm:
            params = SamplingParams.for_model(max_tokens=30, ignore_eos=True)
            streams = [asyncio.ensure_future(collect(llm, f"To be {n}", params)) for n in range(4)]
            await asyncio.sleep(0.5)
            for _ in range(3):
                os.kill(llm.pids["tokenizer.0"], signal.SIGSEGV)
                while not llm.recovering:
                    await asyncio.sleep(0.001)
                while llm.recovering:
                    await asyncio.sleep(0.01)
            found = await asyncio.gather(*streams)
            assert all(len(one.outputs[0].token_ids) == 30 for one in found)
            assert llm._frontend._readmission.trials == 0

    asyncio.run(main())
    assert not children()
