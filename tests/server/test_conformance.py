"""Over HTTP and from the library a conversation becomes the same tokens, those of transformers."""

import asyncio

import httpx2 as httpx
import pytest
from transformers import AutoTokenizer

from nanoactor import SamplingParams
from nanoactor.errors import InvalidRequest
from tests.engine.harness import collect
from tests.server.harness import here, url
from tests.text.conformance import SPECIAL, as_later, model_directory
from tests.text.shapes import CALLS, PARTS, PLAIN, TEXTS, TOOLS
from tests.text.test_chat import THINKING

SHAPES = {
    f"{group} {name}": messages
    for group, shapes in {"plain": PLAIN, "calls": CALLS, "texts": TEXTS, "parts": PARTS}.items()
    for name, messages in shapes.items()
}
OPTIONS = (
    {},
    {"tools": TOOLS},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
)
SIMULATED = dict(device="simulated:1", max_num_seqs=8, max_model_len=1024)


def chat_options(options):
    """As `AsyncLLM.generate` and transformers take what stands in fields of requests."""
    plain = {key: value for key, value in options.items() if key != "chat_template_kwargs"}
    return {**plain, **options.get("chat_template_kwargs", {})}


async def by_library(llm, messages, options):
    chosen = chat_options(options)
    one = SamplingParams.for_model(max_tokens=1)
    try:
        output = await collect(llm, messages, one, chat_template_kwargs=chosen)
    except InvalidRequest:
        return None
    return list(output.prompt_token_ids)


async def over_http(client, messages, options):
    answer = await client.post("/tokenize", json={"messages": messages, **options})
    assert answer.status_code in (200, 400), answer.text
    return answer.json()["tokens"] if answer.status_code == 200 else None


def by_transformers(tokenizer, messages, options):
    values = {"add_generation_prompt": True, **chat_options(options)}
    try:
        return tokenizer.apply_chat_template(as_later(messages), return_dict=False, **values)
    except Exception:  # a template is a program: it can fail in any way
        return None


def test_tokenize_is_the_library_is_transformers(tmp_path):
    path = model_directory(tmp_path, THINKING, **SPECIAL)
    tokenizer = AutoTokenizer.from_pretrained(path)

    async def main():
        async with (
            here(str(path), **SIMULATED) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            equal = 0
            for name, messages in SHAPES.items():
                for options in OPTIONS:
                    found = await over_http(client, messages, options)
                    assert found == await by_library(server.llm, messages, options), name
                    expected = by_transformers(tokenizer, messages, options)
                    assert found == expected, (name, options)
                    equal += found is not None
            assert equal > 100

    asyncio.run(main())


WRONG = [
    ([{"role": "", "content": "a"}], "role"),
    ([{"content": "a"}], "role"),
    ([{"role": "user", "content": 5}], "content"),
    ([{"role": "user", "content": [{"text": "a"}]}], "type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "text"),
    ([{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}], "assistant"),
    (
        [{"role": "user", "content": "a", "tool_calls": TEXTS["an object"][1]["tool_calls"]}],
        "calls",
    ),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "name"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}], "argum"),
    ([{"role": "user", "content": "a", "reasoning": "b"}], "reasoning"),
    ([], "messages"),
]


def test_a_wrong_message_is_refused_at_both_doors_with_its_place():
    async def main():
        async with (
            here("demo", **SIMULATED) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            for messages, named in WRONG:
                answer = await client.post("/tokenize", json={"messages": messages})
                assert answer.status_code == 400, messages
                assert named in answer.json()["error"]["message"]
                with pytest.raises(InvalidRequest, match=named):
                    await collect(server.llm, messages, SamplingParams.for_model(max_tokens=1))

    asyncio.run(main())


OPENS_UNLESS_CALLED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<think>\n{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)


def test_whether_thoughts_begin_an_answer_is_seen_in_the_prompt_itself(tmp_path):
    """After a call's result this template opens none: the whole answer is content."""
    path = model_directory(tmp_path, OPENS_UNLESS_CALLED, **SPECIAL)
    asks = {"role": "user", "content": "?"}
    history = [asks, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]

    async def main():
        config = {"served_model_name": "m"}
        async with (
            here(str(path), config=config, **SIMULATED) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            for messages, thinks in (([asks], True), (history, False)):
                for options in ({}, {"chat_template_kwargs": {"enable_thinking": ""}}):
                    body = {"model": "m", "messages": messages, "max_tokens": 8, **options}
                    answer = await client.post("/v1/chat/completions", json=body)
                    message = answer.json()["choices"][0]["message"]
                    assert bool(message.get("reasoning_content")) == thinks, message
                    assert bool(message["content"]) != thinks

    asyncio.run(main())
