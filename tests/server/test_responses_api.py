"""`/v1/responses`: requests as chats, and the official client against the server."""

import asyncio
import contextlib
import json
import typing

import httpx2 as httpx
import openai
import pydantic
import pytest

from nanoactor.server.errors import APIError
from nanoactor.server.requests import Decoder
from nanoactor.server.responses.request import ResponsesRequest
from nanoactor.server.responses.translate import Tools, to_chat
from nanoactor.server.sealed import seal
from nanoactor.server.translating import Options
from tests.server.harness import url
from tests.server.scripted import scripted

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [
        {"type": "function", "name": "stop", "parameters": {"type": "object"}},
        {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    ],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINK = "<think>\nOslo. A city.\n</think>\n\n"


SEES = Options(accepts_images=True)


def chat(input="Weather in Oslo?", strict=False, options=SEES, **extra):
    """The chat that a body becomes, and the warnings."""
    body = {"model": "m", "input": input, **extra}
    decoded = Decoder(strict).decode(ResponsesRequest, json.dumps(body).encode())
    warnings = []

    def warn(*said):
        warnings.append(said)

    tools = Tools(decoded.tools or (), warn)
    made = to_chat(decoded, tools, options, warn)
    assert Decoder(accepts_images=True).chat(made).messages
    return made, warnings


def messages_of(items, **extra):
    return chat(items, **extra)[0]["messages"]


# -- requests -----------------------------------------------------------------------------


def test_texts_are_the_same_in_every_form():
    forms = [
        "a",
        [{"role": "user", "content": "a"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    ]
    for form in forms:
        assert messages_of(form) == [{"role": "user", "content": "a"}]
    made = messages_of("a", instructions="Be brief.")
    assert made[0] == {"role": "system", "content": "Be brief."}


def test_items_of_one_answer_become_one_message():
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": seal("Hm.")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Oslo"}',
        },
        {
            "type": "function_call",
            "call_id": "c2",
            "name": "weather",
            "namespace": "agents",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_text", "text": "wet"},
                {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"},
            ],
        },
        {"role": "assistant", "content": "Cold and wet."},
        {"role": "user", "content": "Thanks."},
    ]
    user, answer, first, second, image, said, thanks = messages_of(items, tools=[TOOL, SPACE])
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    names = [call["function"]["name"] for call in answer["tool_calls"]]
    assert names == ["weather", "agents__weather"]
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "cold"}
    assert second == {"role": "tool", "tool_call_id": "c2", "content": "wet"}
    assert image["content"][0]["image_url"]["detail"] == "low"
    roles = [message["role"] for message in (user, image, said, thanks)]
    assert roles == ["user", "user", "assistant", "user"]


def test_images_stay_in_results_where_the_template_shows_them():
    shown = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    output = [{"type": "input_text", "text": "wet"}, shown]
    items = [
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    shows = Options(accepts_images=True, renders_result_images=True)
    _, tool = chat(items, options=shows, tools=[TOOL])[0]["messages"]
    assert [part["type"] for part in tool["content"]] == ["text", "image_url"]


def test_thoughts_come_back_in_whatever_form_they_were_kept():
    told = [{"type": "reasoning_text", "text": "Hm."}]
    summary = [{"type": "summary_text", "text": "Hm."}]
    for members in (
        {"content": told},
        {"summary": summary},
        {"encrypted_content": seal("Hm."), "summary": [{"type": "summary_text", "text": "no"}]},
    ):
        items = [{"type": "reasoning", **members}, {"role": "assistant", "content": "Cold."}]
        (answer,) = messages_of(items)
        assert answer["reasoning_content"] == "Hm."
    items = [{"type": "reasoning", "encrypted_content": "gAAAAB"}, {"role": "user", "content": "a"}]
    assert messages_of(items) == [{"role": "user", "content": "a"}]


def test_tools_are_flattened_and_hosted_ones_left_out_with_a_warning():
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_url": "x"},
    ]
    made, warnings = chat(tools=[TOOL, SPACE, *hosted])
    names = [tool["function"]["name"] for tool in made["tools"]]
    assert names == ["weather", "stop", "agents__weather"]
    assert [name for name, _ in warnings] == ["tools: web_search", "tools: mcp"]
    said = {"role": "user", "content": "a"}
    for item in OF_HOSTED:
        made, warnings = chat([item, said])
        assert [name for name, _ in warnings] == [f"input: {item['type']}"]
        assert made["messages"] == [said]


OF_HOSTED = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
    {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "a"}},
    {"type": "tool_search_output", "call_id": "c", "tools": []},
    {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "output": "a"},
    {"type": "compaction", "encrypted_content": "gAAA"},
]


def test_parts_of_outputs_may_have_members_that_say_nothing():
    part = {"type": "input_text", "text": "cold", "providerOptions": {"a": 1}}
    items = [{"type": "function_call_output", "call_id": "c", "output": [part]}]
    assert messages_of(items)[0]["content"] == "cold"


def test_wishes_become_a_chats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made, _ = chat(
        text={
            "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
            "verbosity": "low",
        },
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=7,
        parallel_tool_calls=False,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        temperature=0.5,
        stop=["END"],
        top_k=4,
    )
    expected = {
        "verbosity": "low",
        "reasoning_effort": "high",
        "max_completion_tokens": 7,
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0.5,
        "stop": ["END"],
        "top_k": 4,
    }
    assert expected.items() <= made.items()
    assert made["response_format"]["json_schema"]["schema"] == schema
    assert chat(text={"format": {"type": "json_object"}})[0]["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in chat(text={"format": {"type": "text"}})[0]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
    }
    made, _ = chat(tools=[TOOL, SPACE], tool_choice=allowed)
    assert made["tool_choice"]["allowed_tools"] == {
        "mode": "auto",
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    }


FUNCTION = {"type": "function", "name": "other"}
CALLED = {"type": "function_call", "name": "a", "call_id": "c"}
WRONG = [
    ({"previous_response_id": "r"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0].type"),
    ({"input": [{"type": "nonsense"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "a", "call_id": "c"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].image_url",
    ),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type"),
    ({"tools": [{"type": "nonsense"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": "agents__weather"}, TOOL, SPACE]}, "tools[2].tools[1].name"),
    ({"metadata": {"a": {"b": 1}}}, "metadata[...]"),
    ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input[0].output"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [1]}]},
        "input[0].output",
    ),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": FUNCTION, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("extra", "param"), WRONG, ids=[str(w[0])[:50] for w in WRONG])
def test_what_is_wrong_is_refused_by_the_name_of_its_place(extra, param):
    with pytest.raises(APIError) as caught:
        chat(**extra)
    assert (caught.value.status, caught.value.param) == (400, param)


# -- the official client ------------------------------------------------------------------


class Talk:
    """A client, its server, and what its model says next."""

    def __init__(self, server, client, script):
        self.server, self.client, self.script = server, client, script

    async def both(self, text, **params):
        """The response, asked for at once, and as the client's own accumulator puts it together."""
        values = {"model": "m", "input": "Weather in Oslo?", **params}
        self.script.say(text, by_character=True)
        whole = await self.client.responses.create(**values)
        self.script.say(text, by_character=True)
        async with self.client.responses.stream(**values) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert plain(streamed) == plain(whole)
        return whole, events


def plain(response):
    dumped = response.model_dump(include={"output", "status", "incomplete_details", "error"})
    for item in dumped["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return dumped


@contextlib.asynccontextmanager
async def talk(tmp_path, monkeypatch, config=None, **engine):
    async with scripted(tmp_path, monkeypatch, config, **engine) as (server, script):
        base = f"{url(server)}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield Talk(server, client, script)


def test_the_official_client_reads_thoughts_text_and_calls(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            response, events = await t.both(THINK + "Cold.")
            assert response.output_text == "Cold."
            thoughts = response.output[0]
            assert thoughts.content[0].text == "Oslo. A city."
            deltas = [e for e in events if e.type == "response.output_text.delta"]
            assert len(deltas) > 2, "text is streamed"
            assert response.usage.output_tokens_details.reasoning_tokens > 2

            response, events = await t.both(f"{THINK}I look.\n\n{CALL}", tools=[TOOL])
            call = response.output[-1]
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
            pieces = [e for e in events if e.type == "response.function_call_arguments.delta"]
            assert len(pieces) > 4

            result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
            items = [{"role": "user", "content": "Weather in Oslo?"}, *response.output, result]
            response, _ = await t.both("Cold.", input=items, tools=[TOOL])
            assert response.output_text == "Cold."
            assert response.usage.input_tokens_details.cached_tokens > 100, "the turn before"

            t.script.say("a b c d", by_character=True)
            cut = {"model": "m", "input": "?", "max_output_tokens": 3}
            response = await t.client.responses.create(**cut)
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            events = [event async for event in await t.client.responses.create(**cut, stream=True)]
            assert events[-1].type == "response.incomplete"
            assert events[-1].response.output[0].status == "incomplete"

    asyncio.run(main())


def test_logprobs_are_those_of_the_texts_tokens(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            said = f"{THINK}I look: ünd 北京.\n\n{CALL}"
            wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            response, events = await t.both(said, tools=[TOOL], **wanted)
            assert response.top_logprobs == 2
            (part,) = response.output[1].content
            told = b"".join(bytes(one.bytes) for one in part.logprobs)
            assert told.decode().strip() == part.text == "I look: ünd 北京."
            assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
            streamed = [
                one.logprob
                for event in events
                if event.type == "response.output_text.delta"
                for one in event.logprobs
            ]
            assert streamed == [one.logprob for one in part.logprobs]
            plain_one, _ = await t.both(said, tools=[TOOL])
            assert plain_one.output[1].content[0].logprobs == []

    asyncio.run(main())


class Answer(pydantic.BaseModel):
    """A typed answer."""

    city: typing.Literal["Oslo"]


def test_typed_answers_are_parsed(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            t.script.say('{"city": "Oslo"}', by_character=True)
            response = await t.client.responses.parse(model="m", input="Where?", text_format=Answer)
            assert response.output_parsed == Answer(city="Oslo")

    asyncio.run(main())


def test_tokens_are_counted_as_the_prompt_has_them(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            asked = {"model": "m", "input": "Weather?", "tools": [TOOL], "instructions": "Brief."}
            counted = await t.client.responses.input_tokens.count(**asked)
            t.script.say("Cold.")
            response = await t.client.responses.create(**asked)
            assert counted.input_tokens == response.usage.input_tokens
            async with httpx.AsyncClient(base_url=url(t.server)) as client:
                answer = await client.post("/v1/responses/compact", json=asked)
                other = await client.get("/v1/responses/input_tokens")
            assert (other.status_code, other.headers["Allow"]) == (405, "POST")
            assert answer.status_code == 404
            assert "does not compact" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_stored_responses_are_told_to_be_none(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            t.script.say("Cold.")
            response = await t.client.responses.create(model="m", input="?", store=True)
            assert response.model_dump()["store"] is False
            for ask in (t.client.responses.retrieve, t.client.responses.cancel):
                with pytest.raises(openai.NotFoundError, match="not stored"):
                    await ask(response.id)
            with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
                await t.client.responses.create(
                    model="m", input="?", previous_response_id=response.id
                )
            assert caught.value.param == "previous_response_id"

    asyncio.run(main())


def test_an_error_in_mid_stream_is_a_failed_response(tmp_path, monkeypatch):
    def push(self, text):
        raise RuntimeError("a bug")

    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            monkeypatch.setattr("nanoactor.server.choices.ChatChoice.push", push)
            t.script.say("Hello.")
            body = {"model": "m", "input": "?", "stream": True}
            async with httpx.AsyncClient(base_url=url(t.server)) as client:
                answer = await client.post("/v1/responses", json=body)
            last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["type"] == "response.failed"
            assert "internal error" in last["response"]["error"]["message"]
            text = t.server.metrics.text().decode()
            assert 'outcome="broken_off",path="/v1/responses"} 1.0' in text

    asyncio.run(main())
