"""The text service: started, broken, started again, and never twice."""

import asyncio
import os
import shutil
import signal

import pytest

from nanoactor.errors import EngineDead, InvalidRequest
from nanoactor.models.errors import ModelError
from nanoactor.server import text_service as module
from nanoactor.server.text_service import TextService
from nanoactor.text.renderer import RenderOptions
from tests.conftest import children
from tests.server.scripted import directory
from tests.text.test_chat import DEMO
from tests.text.test_patterns import BACKTRACKS, split, tokenizer_directory


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MIN_RESTART_DELAY", 0.05)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


async def until(check):
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.02)


def test_a_text_service_that_cannot_start_says_why_and_leaves_nothing(model):
    async def main():
        (model / "tokenizer.json").write_text("{}")
        service = TextService(model, 10_000, RenderOptions(5.0, 10_000))
        with pytest.raises(ModelError, match="not a valid tokenizer"):
            await service.start()
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) == 1, "nothing tries again behind the caller's back"
        await service.close()

    before = children()
    asyncio.run(main())
    assert children() == before


ASKS = [{"role": "user", "content": "?"}]


def test_whether_thoughts_may_follow_depends_on_the_templates_options(tmp_path):
    (tmp_path / "m").mkdir()
    path = directory(tmp_path / "m", OPENING)

    async def main():
        service = TextService(path, 10_000, RenderOptions(5.0, 10_000))
        await service.start()
        assert await service.thoughts({}, ASKS) == "optional"
        for mode in ("open", "none", "optional", "open"):
            assert await service.thoughts({"mode": mode}, ASKS) == mode
        assert await service.thoughts({"mode": "fail"}, ASKS) == "none", "refused by the engine too"
        await service.close()
        # What it has been asked it remembers, and without options nothing is to be asked.
        assert await service.thoughts({"mode": "open"}, ASKS) == "open"
        assert await service.thoughts({"mode": "other"}, ASKS) == "optional"

    asyncio.run(main())


OPENING = """\
{% if mode == 'fail' %}{{ raise_exception('no') }}{% endif %}assistant
{% if mode == 'open' %}<think>{% elif mode == 'none' %}<think></think>{% endif %}"""


def test_a_text_service_is_started_again_as_often_as_it_takes_and_only_once(model):
    async def main():
        service = TextService(model, 10_000, RenderOptions(5.0, 10_000))
        await service.start()
        ids = await service.encode("To be", True)
        os.kill(service._system.pids["text_service"], signal.SIGSTOP)  # or it may answer first
        asked = asyncio.ensure_future(service.encode("to be " * 1000, True))
        await asyncio.sleep(0)
        (model / "tokenizer.json").rename(model / "away.json")
        os.kill(service._system.pids["text_service"], signal.SIGKILL)
        with pytest.raises(EngineDead, match="text service"):
            await asked
        await until(lambda: service.state == "dead")
        await asyncio.sleep(2)  # several starts fail
        assert service.state == "dead"
        with pytest.raises(EngineDead):
            await service.encode("To be", True)
        (model / "away.json").rename(model / "tokenizer.json")
        await until(lambda: service.state == "ok")
        assert await service.encode("To be", True) == ids
        assert len(children()) == len(before) + 1
        assert list(await service.decode_all([ids, [], ids])) == ["To be", "", "To be"]
        with pytest.raises(InvalidRequest, match="at most 10000 are accepted"):
            await service.encode("x" * 20_000, True)
        await service.close()
        assert len(asyncio.all_tasks()) == 1

    before = children()
    asyncio.run(main())
    assert children() == before


def test_a_tokenizer_that_backtracks_costs_its_request_alone(tmp_path):
    """Also where the places of tokens are asked for, and with others that are answered."""
    path = tokenizer_directory(tmp_path / "m", pre_tokenizer=split(BACKTRACKS))
    fails, long = "a" * 40 + "!", "To be " * 20_000

    async def main():
        service = TextService(path, 1_000_000, RenderOptions(1.0, 1_000_000))
        await service.start()
        calls = [service.encode(fails, True), service.spans([fails]), service.spans([long])]
        found = await asyncio.gather(*calls, service.spans(["To be"]), return_exceptions=True)
        assert all(isinstance(one, InvalidRequest) for one in found[:2]), found[:2]
        assert "tokenizer" in str(found[1])
        ((first, starts),) = found[3]
        assert (first, starts[0]) == (b"To", 0)
        assert len(found[2][0][1]) > 20_000
        assert service.state == "ok"
        await service.close()

    before = children()
    asyncio.run(main())
    assert children() == before
