"""The tokenizer that users get, and engines of models that come without tokenizer.json."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanoactor import LLM, AsyncLLM
from nanoactor.errors import InvalidRequest, ModelError
from nanoactor.text import huggingface
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy
from tests.text.tokenizers_for_tests import without_tokenizer_json

CHAT = [{"role": "user", "content": "Who is there?"}]
PROMPTS = ("ROMEO:\nBut soft, what light", "To be, or not to be", CHAT)
SIMULATED = dict(device="simulated:1", max_num_seqs=4, placement="single")


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """(the demo model without tokenizer.json, the conversions as they are started)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started, run = [], subprocess.run

    def counted(command, **options):
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(huggingface.subprocess, "run", counted)
    return without_tokenizer_json(tmp_path / "m"), started


@pytest.mark.long  # two engines
def test_a_converted_tokenizer_serves_as_the_models_own(converted):
    path, started = converted

    async def outputs(directory, **where):
        limits = dict(max_num_seqs=4, max_model_len=1024)
        async with engine(directory, skip_tokenizer_init=False, **limits, **where) as llm:
            params = greedy(40, stop=["\n\n"])
            found = [await collect(llm, prompt, params) for prompt in PROMPTS]
            maps = {}
            for name, pid in llm.pids.items():
                with open(f"/proc/{pid}/maps") as file:
                    maps[name] = file.read()
            for name, mapped in maps.items():
                assert ("libtorch" in mapped) == (name == "runner.0"), name
            return [(output.prompt_token_ids, output.outputs[0].text) for output in found]

    theirs = asyncio.run(outputs(path, placement="default"))
    assert theirs == asyncio.run(outputs(DEMO))
    assert all(text for _, text in theirs)
    AsyncLLM(str(path))
    assert len(started) == 1, "another engine finds what the first has made"


def test_neither_transformers_nor_torch_is_loaded_where_actors_live(converted):
    path, _ = converted
    program = f"""
import asyncio, sys
from nanoactor import AsyncLLM, SamplingParams
async def main():
    async with AsyncLLM({str(path)!r}, device="simulated:1", placement="single") as llm:
        for prompt in ("ROMEO:", {CHAT!r}):
            async for output in llm.generate(prompt, SamplingParams.for_model(max_tokens=3)):
                pass
        assert output.finished
    print(*sorted({{"torch", "transformers"}} & set(sys.modules)))
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


def test_a_conversion_that_fails_is_the_models_error(converted):
    path, _ = converted
    (path / "merges.txt").write_text("a b c d\n")
    with pytest.raises(ModelError, match=r"cannot be converted.*skip_tokenizer_init=True"):
        AsyncLLM(str(path))
    AsyncLLM(str(path), skip_tokenizer_init=True)


# -- get_tokenizer ----------------------------------------------------------------------------


def test_users_get_the_tokenizer_of_transformers():
    async def main():
        llm = AsyncLLM("demo", **SIMULATED)
        before, again = await asyncio.gather(llm.get_tokenizer(), llm.get_tokenizer())
        assert before is again, "calls at the same time load it once"
        async with llm:
            assert await llm.get_tokenizer() is before
            output = await collect(llm, CHAT, greedy(3))
        ids = before.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == ids
        assert await llm.get_tokenizer() is before
        return before

    tokenizer = asyncio.run(main())
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(DEMO))
    assert Path(tokenizer.name_or_path).samefile(DEMO)


def test_the_blocking_engine_gives_it_too_with_the_template_of_its_own_file(converted):
    path, _ = converted
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    with LLM(str(path), **SIMULATED) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is llm.get_tokenizer()
        (output,) = llm.chat(CHAT, greedy(3), use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode("Who is there?<|im_end|>")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "Who is there?<|im_end|>"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_conversations_with_what_templates_may_be_told(converted):
    path, _ = converted
    template = (
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if tools %}{{ tools | tojson }}"
        "{% endif %}{% if add_generation_prompt %}>{% endif %}{{ mood }}"
    )
    (path / "chat_template.jinja").write_text(template)
    greeting = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    with LLM(str(path), **SIMULATED) as llm:
        tokenizer = llm.get_tokenizer()

        def rendered(*given, **named):
            outputs = llm.chat(*given, **named, use_tqdm=False)
            return [tokenizer.decode(output.prompt_token_ids) for output in outputs]

        assert rendered(CHAT, greedy(1)) == ["Who is there?;>"]
        assert rendered([CHAT, greeting], greedy(1)) == ["Who is there?;>", "Hi;Ho;>"]
        outputs = llm.chat([CHAT, greeting], [greedy(1), greedy(2)], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
        for named, said in (
            (dict(add_generation_prompt=True), "Hi;Ho;>"),
            (dict(add_generation_prompt=False), "Hi;Ho;"),
            (dict(continue_final_message=True), "Hi;Ho"),
            (dict(continue_final_message=True, add_generation_prompt=False), "Hi;Ho"),
            (dict(continue_final_message=False, tools=[]), "Hi;Ho;>"),
            (dict(tools=[TOOL]), f"Hi;Ho;{json.dumps([TOOL])}>"),
            (dict(chat_template_kwargs={"mood": "!"}), "Hi;Ho;>!"),
            (dict(chat_template_kwargs={"mood": "!"}, add_generation_prompt=False), "Hi;Ho;!"),
            (
                dict(chat_template_kwargs={"tools": [TOOL]}, add_generation_prompt=False),
                f"Hi;Ho;{json.dumps([TOOL])}",
            ),
        ):
            assert rendered(greeting, greedy(1), **named) == [said]
        with pytest.raises(InvalidRequest, match="are mutually exclusive"):
            rendered(greeting, continue_final_message=True, add_generation_prompt=True)
        with pytest.raises(InvalidRequest, match="chat_template_kwargs must be a dict"):
            rendered(greeting, chat_template_kwargs=["tools"])
        with pytest.raises(InvalidRequest, match="chat_template_kwargs must contain only JSON"):
            rendered(greeting, tools=[print])
        with pytest.raises(InvalidRequest, match="does not read 'temper'; it reads .*mood"):
            rendered(greeting, chat_template_kwargs={"temper": 1})
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with LLM(str(path), **SIMULATED) as llm:
        with pytest.raises(InvalidRequest, match="does not show them"):
            llm.chat(greeting, tools=[TOOL], use_tqdm=False)
        assert len(llm.chat(greeting, greedy(1), use_tqdm=False)) == 1


def test_options_that_are_nested_too_deeply_end_their_request_alone():
    """A user's process may allow more than ours do."""
    limit = sys.getrecursionlimit()
    nested = 1
    # From Python 3.12 on, `json` does not heed the limit, but has one of its own.
    for _ in range(2 * limit if sys.version_info < (3, 12) else 100_000):
        nested = [nested]
    with LLM("demo", **{**SIMULATED, "placement": "default"}) as llm:
        sys.setrecursionlimit(5 * limit)
        try:
            with pytest.raises(InvalidRequest, match="nested too deeply|must contain only JSON"):
                llm.chat(CHAT, chat_template_kwargs={"tools": nested}, use_tqdm=False)
        finally:
            sys.setrecursionlimit(limit)
        assert len(llm.chat(CHAT, greedy(1), use_tqdm=False)) == 1


def test_without_a_tokenizer_there_is_none_to_get():
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
        asyncio.run(AsyncLLM("demo", skip_tokenizer_init=True).get_tokenizer())


def test_a_tokenizer_that_transformers_cannot_load_is_named(converted):
    path, _ = converted
    llm = AsyncLLM(str(path))
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=f"cannot load the tokenizer of {path}") as caught:
        asyncio.run(llm.get_tokenizer())
    assert type(caught.value).__module__ == "nanoactor.errors"
