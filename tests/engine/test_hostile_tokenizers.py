"""A tokenizer that takes too long, too much, or fails costs the request, and no process."""

import asyncio
import threading

import pytest

from nanoactor import AsyncLLM, EngineConfig, SamplingParams
from nanoactor.actors.tokenizer import TokenizerActor
from nanoactor.errors import InvalidRequest
from nanoactor.model_files.files import read_model_files
from nanoactor.setup.actors import ActorConfig
from nanoactor.text import prompt_encoder
from nanoactor.text.tokenizer import TextEncoder
from tests.conftest import children
from tests.engine.harness import collect, settled
from tests.text.test_patterns import BACKTRACKS, replace, sequence, split, tokenizer_directory

FAILS = "a" * 40 + "!"
"""The library gives up after ten million retries."""
NEVER_ENDS = ("a" * 21 + "!") * 2900
"""Two million retries for each of 2,900 words, and again for each of their letters."""


def engine(path, **options):
    # With `awake_ms`, processes rehearse requests, as they do on machines with many cores.
    shape = dict(device="simulated:2", max_model_len=512, template_timeout=1.0, awake_ms=1.0)
    return AsyncLLM(str(path), **shape | options)


async def ended(llm, prompt, **params):
    few = SamplingParams.for_model(max_tokens=3, ignore_eos=True, **params)
    try:
        output = await collect(llm, prompt, few)
    except InvalidRequest as error:
        return str(error)
    return len(output.outputs[0].token_ids)


def test_a_pattern_that_backtracks_costs_its_request_alone(tmp_path):
    path = tokenizer_directory(tmp_path / "m", pre_tokenizer=split(BACKTRACKS))

    async def main():
        async with engine(path) as llm:
            params = SamplingParams.for_model(max_tokens=400, ignore_eos=True)
            stranger = asyncio.ensure_future(collect(llm, "To be", params))
            assert "tokenizer failed" in await ended(llm, FAILS)
            assert "tokenizer failed" in await ended(llm, "fine", bad_words=[FAILS])
            assert "took longer than 1 s" in await ended(llm, NEVER_ENDS)
            assert await ended(llm, "fine") == 3
            assert len((await stranger).outputs[0].token_ids) == 400
            await settled(llm)
            assert llm.restarts == ({}, 0.0)

    asyncio.run(main())
    assert not children()


def test_a_normalizer_that_multiplies_text_costs_its_request_alone(tmp_path):
    grows = [replace("a", "a" * 60)] * 5
    path = tokenizer_directory(tmp_path / "m", normalizer=sequence("normalizers", *grows))

    async def main():
        async with engine(path) as llm:
            told = await ended(llm, "aaaa")
            assert "tokenizer" in told
            assert await ended(llm, "fine") == 3
            await settled(llm)
            assert llm.restarts == ({}, 0.0)

    asyncio.run(main())
    assert not children()


@pytest.mark.parametrize("growth", [1, 60])
def test_a_rehearsal_encodes_nothing_that_needs_another_process(tmp_path, growth):
    """With enough cores, processes that are notified of a request rehearse it."""
    steps = dict(normalizer=sequence("normalizers", *[replace("a", "a" * growth)] * 2))
    path = tokenizer_directory(tmp_path / "m", **steps)
    config = EngineConfig(str(path))
    actor = TokenizerActor(ActorConfig(config, read_model_files(config), bytes(16)))
    actor.setup()
    actor._block_size = 16
    try:
        assert len(list(actor.rehearse())) == (2 if growth == 1 else 1)
    finally:
        actor.stop()


@pytest.mark.parametrize("prompt", ["To be, or not to be", "aab aa b " * 30, ""])
def test_an_unknown_pattern_gives_the_same_ids(tmp_path, prompt):
    path = tokenizer_directory(tmp_path / "m", pre_tokenizer=split(r"(?:\w|'){1,5}"))
    encoder = TextEncoder(path)
    assert not encoder.is_bounded

    async def main():
        async with engine(path) as llm:
            if not prompt:
                assert isinstance(await ended(llm, prompt), str)
                return
            output = await collect(
                llm, prompt, SamplingParams.for_model(max_tokens=1, bad_words=["be"])
            )
            assert output.prompt_token_ids == encoder.encode_text(prompt).tolist()

    asyncio.run(main())


def test_long_texts_hold_up_no_others(monkeypatch):
    """They are encoded on a thread: what comes behind them is answered first."""
    entered, go_on, encode = threading.Event(), threading.Event(), TextEncoder.encode

    def slowly(encoder, pieces):
        if threading.current_thread().name == "long texts":
            entered.set()
            assert go_on.wait(60)
        return encode(encoder, pieces)

    monkeypatch.setattr(prompt_encoder, "LONG_TEXT", 100)
    monkeypatch.setattr(TextEncoder, "encode", slowly)

    async def main():
        async with engine("demo", placement="single") as llm:
            long = asyncio.ensure_future(ended(llm, "word " * 30))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            assert await ended(llm, "short") == 3
            assert not long.done()
            go_on.set()
            assert await long == 3

    asyncio.run(main())
