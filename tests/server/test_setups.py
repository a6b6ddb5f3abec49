"""What fails in the background of a server is tried again, and told as what it is."""

import asyncio
import subprocess
import sys

import pytest

from nanoactor.errors import EngineDead, OutOfResources
from nanoactor.server import monitor as monitor_module
from nanoactor.server import text_service as text_service_module
from nanoactor.server.text_service import TextService
from nanoactor.text import renderer as renderer_module
from nanoactor.text.renderer import Renderer, RenderOptions
from tests.server.harness import here
from tests.text.tokenizers_for_tests import DEMO

LIMITS = RenderOptions(5.0, 10_000)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_text_service_that_cannot_be_started_again_is_tried_again(monkeypatch, error):
    monkeypatch.setattr(text_service_module, "_MIN_RESTART_DELAY", 0.01)

    async def main():
        service = TextService(DEMO, 10_000, LIMITS)
        await service.start()
        begin, failed = service.start, []

        async def start():
            if len(failed) < 2:
                failed.append(error)
                raise error
            await begin()

        monkeypatch.setattr(service, "start", start)
        service._on_death(RuntimeError("killed"))
        with pytest.raises(EngineDead):
            await service.encode("a", add_special_tokens=True)
        while service.state != "ok":
            await asyncio.sleep(0.01)
        assert await service.encode("a", add_special_tokens=True)
        assert len(failed) == 2
        await service.close()

    asyncio.run(asyncio.wait_for(main(), 200))


def test_one_look_that_fails_does_not_end_the_monitor(monkeypatch):
    monkeypatch.setattr(monitor_module, "INTERVAL", 0.01)

    async def main():
        async with here("demo", device="simulated:1", max_num_seqs=4) as server:
            looks, tell = [], server.llm.statistics

            async def statistics():
                looks.append(None)
                if len(looks) == 1:
                    raise OutOfResources("no memory for figures")
                return await tell()

            monkeypatch.setattr(server.llm, "statistics", statistics)
            while len(looks) < 4:
                await asyncio.sleep(0.01)
            assert server._monitor.health().is_ok

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_template_child_that_dies_before_its_first_word_is_the_machines_fault(monkeypatch):
    monkeypatch.setattr(renderer_module, "interpreter", lambda: "/bin/false")
    renderer = Renderer(DEMO, LIMITS)
    with pytest.raises(OutOfResources, match="before it was ready"):
        renderer.render("[]", "{}", 5.0)
    renderer.end()


WITHOUT = """
import sys
sys.modules["llguidance"] = None
from nanoactor import LLM, SamplingParams
from nanoactor.errors import InvalidRequest

with LLM("demo", device="simulated:1", max_num_seqs=4, placement="single") as llm:
    params = SamplingParams(max_tokens=4, structured_outputs={"regex": "a"})
    try:
        llm.generate("a", params, use_tqdm=False)
    except InvalidRequest as error:
        assert "llguidance" in str(error), error
    else:
        raise AssertionError("it is not refused")
"""


def test_a_grammar_library_that_cannot_be_loaded_refuses_with_its_reason():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=200)
