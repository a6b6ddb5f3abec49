"""`/v1/messages`: requests as chats, and the official client against the server."""

import asyncio
import contextlib
import json
import logging

import anthropic
import httpx2 as httpx
import pytest

from nanoactor.server import pings
from nanoactor.server.anthropic.request import CountTokensRequest, MessagesRequest
from nanoactor.server.anthropic.translate import FIELD_NAMES, to_chat
from nanoactor.server.context import RequestContext
from nanoactor.server.errors import APIError, invalid, rename_fields
from nanoactor.server.requests import Decoder
from nanoactor.server.sealed import seal
from nanoactor.server.translating import Options
from tests.server.event_grammars import decoded, message_of
from tests.server.harness import url
from tests.server.scripted import scripted

ASK = [{"role": "user", "content": "Weather in Oslo?"}]
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINK = "<think>\nOslo. A city.\n</think>\n\n"
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
}


def chat(messages=ASK, options=None, kind=MessagesRequest, **extra):
    """The chat that a body becomes, and the warnings."""
    body = {"model": "m", "max_tokens": 9, "messages": messages, **extra}
    if kind is CountTokensRequest:
        del body["max_tokens"]
    decoder, warnings = Decoder(), []
    decoded = decoder.decode(kind, json.dumps(body).encode())
    options = options or Options(accepts_images=True)
    made = to_chat(decoded, options, lambda *said: warnings.append(said))
    decoder_of_chats = Decoder(accepts_images=True)
    assert decoder_of_chats.chat(made).messages
    return made, warnings


def messages_of(messages, **extra):
    return chat(messages, **extra)[0]["messages"]


# -- requests -----------------------------------------------------------------------------


def test_texts_are_the_same_as_a_list_or_as_a_string():
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    for role in ("user", "assistant", "system"):
        listed = messages_of([{"role": role, "content": parts}, *ASK], system=parts)
        assert listed == messages_of([{"role": role, "content": "a"}, *ASK], system="a")
        assert [m["content"] for m in listed] == ["a", "a", "Weather in Oslo?"]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of(ASK, system=two)[0] == {"role": "system", "content": "a\nb"}


def test_a_system_message_keeps_its_place():
    said = messages_of([ASK[0], {"role": "system", "content": "Hear."}, *ASK], system="Be brief.")
    assert [m["role"] for m in said] == ["system", "user", "system", "user"]


def test_calls_and_results_become_those_of_a_chat():
    conversation = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": seal("Well.")},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Bergen"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "cold"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "wet"}, IMAGE],
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    _, answer, first, second, user = messages_of(conversation, tools=[TOOL])
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.\nWell.", "I look.")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [
        *({"city": "Oslo"}, {"city": "Bergen"})
    ]
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "cold"}
    assert second == {"role": "tool", "tool_call_id": "t2", "content": "wet"}
    image, text = user["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,aGk="
    assert text == {"type": "text", "text": "And?"}


def test_images_stay_in_results_where_the_template_shows_them():
    content = [{"type": "text", "text": "wet"}, IMAGE]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    shows = Options(accepts_images=True, renders_result_images=True)
    for is_error, first in ((False, "wet"), (True, "Error:")):
        results = [{**result, "is_error": is_error}, {"type": "text", "text": "And?"}]
        asked = [
            *ASK,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": results},
        ]
        made, _ = chat(asked, shows)
        *_, tool, user = made["messages"]
        assert [part["type"] for part in tool["content"]][-2:] == ["text", "image_url"]
        assert tool["content"][0]["text"] == first
        assert user["content"] == "And?"


def test_omitted_thoughts_come_back_from_their_signature():
    block = {"type": "thinking", "thinking": "", "signature": seal("Hm.")}
    content = [block, {"type": "text", "text": "Cold."}]
    _, answer, _ = messages_of([*ASK, {"role": "assistant", "content": content}, *ASK])
    assert answer["reasoning_content"] == "Hm."


def test_key_order_changes_nothing():
    def shuffled(value):
        if isinstance(value, dict):
            return {name: shuffled(value[name]) for name in sorted(value, reverse=True)}
        return [shuffled(one) for one in value] if isinstance(value, list) else value

    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"day": "x", "city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "cold"}
    turns = [
        *ASK,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    made, _ = chat(turns, tools=[TOOL])
    again, _ = chat(shuffled(turns), tools=shuffled([TOOL]))
    for name in ("messages", "tools"):
        assert json.dumps(made[name]) == json.dumps(again[name])
    schema = made["tools"][0]["function"]["parameters"]
    assert list(schema) == ["type", "properties", "required"]
    assert list(schema["properties"]) == ["city", "day"], "as `required` names them"
    arguments = made["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert list(arguments) == ["city", "day"]


BILLING = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=cli;"


def test_lines_that_change_by_themselves_are_left_out_unless_they_are_wanted():
    def system(check, keep=False):
        blocks = [{"type": "text", "text": BILLING.format(check)}, {"type": "text", "text": "Hi."}]
        options = Options(drop_volatile_lines=not keep)
        made, warnings = chat(ASK, options, system=blocks)
        return made["messages"][0]["content"], [name for name, _ in warnings]

    assert system("4a6") == system("c01") == ("Hi.", ["system: x-anthropic-billing-header"])
    assert system("4a6", keep=True)[0] == BILLING.format("4a6") + "\nHi."
    text = BILLING.format("4a6") + "\nHi."
    assert messages_of(ASK, system=text)[0]["content"] == "Hi."
    said = "Say x-anthropic-billing-header: no"
    assert messages_of(ASK, system=said)[0]["content"] == said
    assert messages_of([{"role": "user", "content": text}])[0]["content"] == text


def test_wishes_become_a_chats():
    made, _ = chat(
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"a": 1}}},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        min_p=0.1,
        stream=True,
    )
    expected = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "enable_thinking": True,
        "reasoning_effort": "high",
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "stream": True,
        "max_tokens": 9,
    }
    assert expected.items() <= made.items()
    assert made["response_format"]["json_schema"]["schema"] == {"a": 1}
    named, _ = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    for choice in ("auto", "none"):
        assert "tool_choice" not in chat(tool_choice={"type": choice})[0]
        assert chat(tools=[TOOL], tool_choice={"type": choice})[0]["tool_choice"] == choice
    assert chat(thinking={"type": "disabled"})[0]["enable_thinking"] is False
    assert "enable_thinking" not in chat()[0]
    assert chat(output_format={"type": "json_schema", "schema": {}})[0]["response_format"]


def test_an_assistants_last_message_is_continued():
    made, _ = chat([*ASK, {"role": "assistant", "content": "It is"}])
    assert made["continue_final_message"] is True
    assert made["add_generation_prompt"] is False
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    made, _ = chat([*ASK, {"role": "assistant", "content": [call]}], tools=[TOOL])
    assert "continue_final_message" not in made


HOSTED = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


def test_tools_that_others_run_are_left_out_with_a_warning():
    made, warnings = chat(tools=[*HOSTED, {**TOOL, "type": "custom", "defer_loading": True}])
    assert [tool["function"]["name"] for tool in made["tools"]] == ["weather"]
    assert [name for name, _ in warnings] == [f"tools: {tool['type']}" for tool in HOSTED]
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Cold."},
    ]
    made, warnings = chat([*ASK, {"role": "assistant", "content": blocks}, *ASK])
    assert made["messages"][1]["content"] == "Cold."
    assert len(warnings) == 2


def test_documents_and_search_results_of_text_are_text():
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}},
        SEARCHED,
    ]
    expected = "T\nbody\nS\nhttps://example.org/x\nfound"
    assert messages_of([{"role": "user", "content": blocks}])[0]["content"] == expected
    result = {"type": "tool_result", "tool_use_id": "t", "content": [SEARCHED]}
    assert messages_of([{"role": "user", "content": [result]}])[0]["content"] == (
        "S\nhttps://example.org/x\nfound"
    )


SEARCHED = {
    "type": "search_result",
    "source": "https://example.org/x",
    "title": "S",
    "content": [{"type": "text", "text": "found"}],
    "citations": {"enabled": True},
}


def test_a_result_that_is_an_error_says_so():
    for content, expected in (("", "Error"), ("no such file", "Error: no such file")):
        result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
        assert messages_of([{"role": "user", "content": [result]}])[0]["content"] == expected


def said(*blocks, role="user"):
    """A body's messages: one, with these blocks."""
    return {"messages": [{"role": role, "content": list(blocks)}]}


WRONG = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"type": "tool_use", "id": "t"}), "messages[0].content[0].type"),
    (said({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
    (said({"type": "tool_use", "id": "t"}, role="assistant"), "messages[0].content[0].name"),
    (said({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source"),
    (said({"type": "document", "source": {"type": "base64"}}), "messages[0].content[0].source"),
    (said({"type": "image", "source": "https://example.org"}), "messages[0].content[0].source"),
    (said({"type": "document", "source": "text"}), "messages[0].content[0].source"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"stop": "a"}, "stop"),
    ({"n": 2}, "n"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("extra", "param"), WRONG, ids=[str(w[0])[:50] for w in WRONG])
def test_what_is_wrong_is_refused_by_the_name_of_its_place(extra, param):
    with pytest.raises(APIError) as caught:
        chat(**{"messages": ASK, **extra})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_image_for_a_model_that_sees_none_is_refused():
    with pytest.raises(APIError, match="does not accept images"):
        chat([{"role": "user", "content": [IMAGE]}], Options(accepts_images=False))


def test_what_a_chat_calls_otherwise_is_named_as_here():
    for ours, theirs in FIELD_NAMES.items():
        problem = rename_fields(invalid(f"{ours}: is wrong", ours), FIELD_NAMES)
        assert (problem.message, problem.param) == (f"{theirs}: is wrong", theirs)
    assert rename_fields(invalid("stopping is", "stopping"), FIELD_NAMES).param == "stopping"
    assert RequestContext  # which does so with every error


def test_deeply_nested_schemas_are_refused_not_followed():
    schema = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    try:
        made, _ = chat(tools=[{"name": "a", "input_schema": schema}])
    except (APIError, RecursionError):
        return
    assert made["tools"]


# -- the official client ------------------------------------------------------------------


class Talk:
    """A client, its server, and what its model says next."""

    def __init__(self, server, client, script):
        self.server, self.client, self.script = server, client, script

    async def both(self, text, **params):
        """The message, asked for at once, and as the client's own accumulator puts it together."""
        values = {"model": "m", "messages": ASK, "max_tokens": 500, **params}
        self.script.say(text, by_character=True)
        whole = await self.client.messages.create(**values)
        self.script.say(text, by_character=True)
        async with self.client.messages.stream(**values) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
        assert plain(streamed) == plain(whole)
        return whole, events


def plain(message):
    dumped = message.model_dump(exclude={"id", "usage"}, exclude_none=True)
    for block in dumped["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return dumped


@contextlib.asynccontextmanager
async def talk(tmp_path, monkeypatch, config=None, **engine):
    async with scripted(tmp_path, monkeypatch, config, **engine) as (server, script):
        made = anthropic.AsyncAnthropic(
            base_url=url(server), api_key="none", max_retries=0, timeout=60
        )
        async with made as client:
            yield Talk(server, client, script)


def test_the_official_client_reads_thoughts_text_and_calls(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            message, events = await t.both(THINK + "Cold.")
            thoughts, text = message.content
            assert (thoughts.thinking, text.text) == ("Oslo. A city.", "Cold.")
            assert message.stop_reason == "end_turn"
            assert sum(event.type == "text" for event in events) > 2, "text is streamed"
            assert message.usage.output_tokens > 5

            message, events = await t.both(f"{THINK}I look.\n\n{CALL}", tools=[TOOL])
            call = message.content[-1]
            assert (call.name, call.input) == ("weather", {"city": "Oslo"})
            assert message.stop_reason == "tool_use"
            assert sum(event.type == "input_json" for event in events) > 4

            result = {"type": "tool_result", "tool_use_id": call.id, "content": "cold"}
            turns = [
                *ASK,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
            message, _ = await t.both("Cold.", messages=turns, tools=[TOOL])
            message, _ = await t.both("Cold.", messages=turns, tools=[TOOL])
            assert message.content[0].text == "Cold."
            # Asked a second time, all but the last block of the prompt came from the cache.
            usage = message.usage
            assert usage.cache_read_input_tokens > usage.input_tokens

            message, _ = await t.both("a b END c", stop_sequences=["END"])
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
            assert message.content[0].text == "a b "

            message, _ = await t.both("a b c d", max_tokens=3)
            assert message.stop_reason == "max_tokens"

    asyncio.run(main())


def test_more_tokens_than_are_left_are_a_cap(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch, max_model_len=256) as t:
            message, _ = await t.both("a b c", max_tokens=32_000)
            assert message.stop_reason == "end_turn"
            t.script.say("a " * 400)
            message = await t.client.messages.create(model="m", max_tokens=32_000, messages=ASK)
            assert message.stop_reason == "max_tokens"
            usage = message.usage
            total = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
            assert total == 256

    asyncio.run(main())


def test_errors_have_anthropics_shape(tmp_path, monkeypatch):
    async def main():
        config = {"api_keys": ("k",), "drop_volatile_lines": True}
        async with talk(tmp_path, monkeypatch, config) as t:
            create = t.client.messages.create
            with pytest.raises(anthropic.AuthenticationError, match="API key"):
                await create(model="m", max_tokens=5, messages=ASK)
            keyed = t.client.with_options(api_key="k").messages.create
            assert (await keyed(model="m", max_tokens=5, messages=ASK)).content is not None
            with pytest.raises(anthropic.NotFoundError) as caught:
                await keyed(model="other", max_tokens=5, messages=ASK)
            error = caught.value.body
            assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
            assert error["request_id"] == caught.value.response.headers["x-request-id"]
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await keyed(model="m", max_tokens=5, messages=ASK, extra_body={"temperature": -1})

    asyncio.run(main())


def test_tokens_are_counted_as_the_prompt_has_them(tmp_path, monkeypatch, caplog):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            count = t.client.messages.count_tokens
            asked = dict(model="m", messages=ASK, tools=[TOOL], system="Be brief.")
            counted = await count(**asked)
            message, _ = await t.both("Cold.", **{k: v for k, v in asked.items() if k != "model"})
            usage = message.usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            billed = [{"type": "text", "text": BILLING.format(n) + "\nBe brief."} for n in "ab"]
            with caplog.at_level(logging.WARNING, "nanoactor.server"):
                for system in billed:
                    again = await count(**{**asked, "system": [system]})
                    assert again.input_tokens == counted.input_tokens
            assert caplog.text.count("x-anthropic-billing-header") == 1

    asyncio.run(main())


def test_a_silent_stream_is_kept_open_by_pings(tmp_path, monkeypatch):
    monkeypatch.setattr(pings, "PING_SECONDS", 0.02)

    async def main():
        async with talk(tmp_path, monkeypatch, device="simulated:300") as t:
            t.script.say("Cold.")
            asked = dict(model="m", max_tokens=5, messages=ASK, stream=True)
            base = url(t.server)
            async with httpx.AsyncClient(base_url=base, timeout=60) as client:
                answer = await client.post("/v1/messages", json=asked)
            kinds = [event["type"] for event in decoded(answer.content)]
            first = kinds.index("content_block_start")
            assert kinds[:2] == ["message_start", "ping"]
            assert kinds[2:first].count("ping") >= 2, "before the first token"
            assert kinds[-1] == "message_stop"
            assert message_of(decoded(answer.content))["content"][0]["text"] == "Cold."

    asyncio.run(main())


def test_headers_queries_and_fields_of_agents_are_accepted(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            body = {
                "model": "m",
                "max_tokens": 5,
                "messages": ASK,
                "metadata": {"user_id": "u"},
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
                },
                "cache_control": {"type": "ephemeral"},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y", "x-api-key": "k"}
            async with httpx.AsyncClient(base_url=url(t.server), headers=headers) as client:
                for path in ("/v1/messages?beta=true", "/messages", "/v1/messages/"):
                    answer = await client.post(path, json=body)
                    assert answer.status_code == 200, answer.text
                assert (await client.get("/v1/messages")).status_code == 405

    asyncio.run(main())
