"""The desk: started, broken, started again, and never twice."""

import asyncio
import os
import shutil
import signal

import pytest

from nanoactor.errors import EngineDead, InvalidRequest
from nanoactor.models.errors import ModelError
from nanoactor.server import desk as module
from nanoactor.server.desk import Desk
from nanoactor.text.renderer import RenderLimits
from tests.conftest import children
from tests.text.test_chat import DEMO


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.05)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


async def until(check):
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.02)


def test_a_desk_that_cannot_start_says_why_and_leaves_nothing(model):
    async def main():
        (model / "tokenizer.json").write_text("{}")
        desk = Desk(model, 10_000, RenderLimits(5.0, 10_000))
        with pytest.raises(ModelError, match="not a tokenizer"):
            await desk.start()
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) == 1, "nothing tries again behind the caller's back"
        await desk.close()

    before = children()
    asyncio.run(main())
    assert children() == before


def test_a_desk_is_started_again_as_often_as_it_takes_and_only_once(model):
    async def main():
        desk = Desk(model, 10_000, RenderLimits(5.0, 10_000))
        await desk.start()
        ids = await desk.encode("To be", True)
        asked = asyncio.ensure_future(desk.encode("to be " * 1000, True))
        await asyncio.sleep(0)
        (model / "tokenizer.json").rename(model / "away.json")
        os.kill(desk._system.pids["desk"], signal.SIGKILL)
        with pytest.raises(EngineDead, match="desk"):
            await asked
        await until(lambda: desk.state == "dead")
        await asyncio.sleep(2)  # several starts fail
        assert desk.state == "dead"
        with pytest.raises(EngineDead):
            await desk.encode("To be", True)
        (model / "away.json").rename(model / "tokenizer.json")
        await until(lambda: desk.state == "ok")
        assert await desk.encode("To be", True) == ids
        assert len(children()) == len(before) + 1
        assert list(await desk.decode_all([ids, [], ids])) == ["To be", "", "To be"]
        with pytest.raises(InvalidRequest, match="too many"):
            await desk.encode("x" * 20_000, True)
        await desk.close()
        assert len(asyncio.all_tasks()) == 1

    before = children()
    asyncio.run(main())
    assert children() == before
