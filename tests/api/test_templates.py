"""Chat templates, generation settings and lengths that take the places of the model's own."""

import asyncio
import json

import pytest

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.models.errors import ModelError

FAST = dict(device="simulated:1", placement="single")
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
ASKED = [{"role": "user", "content": "Speak."}]


async def tokens_of(**options):
    async with AsyncLLM("demo", **FAST, **options) as llm:
        async for output in llm.generate(ASKED, SamplingParams(max_tokens=1)):
            prompt = output.prompt_token_ids
        async for output in llm.generate("[user] Speak. ", SamplingParams(max_tokens=1)):
            expected = output.prompt_token_ids
        return list(prompt), list(expected)


@pytest.mark.parametrize("way", ["file", "text"])
def test_a_chat_template_takes_the_place_of_the_models(tmp_path, way):
    path = tmp_path / "other.jinja"
    path.write_text(OTHER)
    given = str(path) if way == "file" else OTHER
    prompt, expected = asyncio.run(tokens_of(chat_template=given))
    assert prompt == expected
    prompt, expected = asyncio.run(tokens_of())
    assert prompt != expected


def test_a_template_that_is_none_is_refused_when_the_engine_is_made(tmp_path):
    with pytest.raises(
        InvalidConfig, match="chat_template .*none.jinja.* is neither a template nor a file"
    ):
        AsyncLLM("demo", chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ModelError, match="malformed"):
        asyncio.run(tokens_of(chat_template="{% if %}"))


def test_settings_take_the_place_of_the_files(tmp_path):
    def of(**options):
        return AsyncLLM("demo", **options).files.generation

    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert of(generation_config=str(tmp_path)).sampling["top_k"] == 7
    both = of(
        generation_config=str(tmp_path),
        override_generation_config={"temperature": 0.25, "max_new_tokens": 9, "eos_token_id": [3]},
    )
    assert (both.sampling["top_k"], both.sampling["temperature"]) == (7, 0.25)
    assert (both.max_new_tokens, both.eos_token_ids) == (9, (3,))
    alone = of(generation_config="vllm", override_generation_config={"top_p": 0.5})
    assert (alone.sampling["top_p"], alone.max_new_tokens) == (0.5, None)
    assert of(override_generation_config={"do_sample": False}).sampling["temperature"] == 0
    plain = of()
    assert of(override_generation_config={}) == plain


@pytest.mark.parametrize(
    ("overrides", "says"),
    [({"temperature": -1}, "temperature"), ({"num_beams": 4}, "'num_beams' is not supported")],
)
def test_settings_that_are_none_are_refused(overrides, says):
    with pytest.raises(InvalidConfig, match=f"override_generation_config: .*{says}"):
        AsyncLLM("demo", override_generation_config=overrides)


def test_a_directory_without_settings_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="generation_config must be"):
        AsyncLLM("demo", generation_config=str(tmp_path))


# -- lengths ------------------------------------------------------------------------------


def test_an_automatic_length_is_what_the_cache_holds(caplog):
    async def main():
        async with AsyncLLM("demo", **FAST, max_model_len="auto", num_kv_blocks=8) as llm:
            assert llm.files.max_model_len == 8 * 16
            params = SamplingParams.for_model(ignore_eos=True)
            (request,) = llm.submit([{"prompt_token_ids": [5] * 100}], params)
            async for output in request:
                last = output
            assert len(last.outputs[0].token_ids) == 28, "as many as fit"
            for prompt in ({"prompt_token_ids": [5] * 128}, "a " * 200):
                with pytest.raises(InvalidRequest, match="max_model_len is 128"):
                    async for _ in llm.generate(prompt, SamplingParams(max_tokens=1)):
                        pass
        async with AsyncLLM("demo", **FAST, max_model_len=-1) as llm:
            assert llm.files.max_model_len == 40_960, "the model's own, which fits"

    asyncio.run(main())
    assert "max_model_len has been lowered to 128, because the KV cache has no room" in caplog.text


@pytest.mark.parametrize("placement", ["default", "split"])
def test_an_automatic_length_is_known_to_all_processes(placement):
    async def main():
        options = dict(device="cpu", threads=1, num_kv_blocks=8, placement=placement)
        async with AsyncLLM("demo", max_model_len="auto", **options) as llm:
            params = SamplingParams.for_model(ignore_eos=True, max_tokens=None, min_tokens=1)
            (request,) = llm.submit([{"prompt_token_ids": [5] * 100}], params)
            async for output in request:
                last = output
            assert len(last.outputs[0].token_ids) == 28, "the scheduler's limit"
            with pytest.raises(InvalidRequest, match="max_model_len is 128"):  # the tokenizer's
                async for _ in llm.generate("a " * 200, SamplingParams(max_tokens=1)):
                    pass

    asyncio.run(main())
