"""Thoughts and tool calls as clients see them, streamed and not, from a model that reads a script.

The engine runs in this process (placement "single"), so that the script reaches its device.
"""

import asyncio
import contextlib
import json

import openai
import pytest

from tests.server.harness import url
from tests.server.scripted import scripted

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK = [{"role": "user", "content": "Weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINK = "<think>\nOslo. A city.\n\nSo:\n</think>\n\n"


class Talk:
    """A client, and what its model says next."""

    def __init__(self, server, client, script):
        self.server = server
        self.client = client
        self.script = script

    async def both(self, text, by_character=True, **params):
        """The message and reason, asked for at once and put together from a stream."""
        self.script.say(text, by_character)
        values = {"model": "m", "messages": ASK, **params}
        whole = (await self.client.chat.completions.create(**values)).choices[0]
        self.script.say(text, by_character)
        stream = await self.client.chat.completions.create(**values, stream=True)
        deltas, reason = [], None
        async for chunk in stream:
            deltas.append(chunk.choices[0].delta)
            reason = chunk.choices[0].finish_reason or reason
        assert reason == whole.finish_reason
        assert_same(whole.message, deltas)
        return whole.message, reason, deltas


def assert_same(message, deltas):
    assert "".join(d.content or "" for d in deltas) == (message.content or "")
    thoughts = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thoughts == (getattr(message, "reasoning_content", None) or "")
    calls = []
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls)
                assert call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    whole = [[c.function.name, c.function.arguments] for c in message.tool_calls or []]
    assert calls == whole
    assert len({c.id for c in message.tool_calls or []}) == len(calls)


@contextlib.asynccontextmanager
async def talk(tmp_path, monkeypatch, config=None, **template):
    async with scripted(tmp_path, monkeypatch, config, **template) as (server, script):
        base = f"{url(server)}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield Talk(server, client, script)


def test_thoughts_and_calls(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            message, reason, deltas = await t.both(THINK + "Cold.")
            assert message.reasoning_content == "Oslo. A city.\n\nSo:"
            assert (message.content, reason) == ("Cold.", "stop")
            assert len(deltas) > 6, "thoughts are streamed"

            message, reason, deltas = await t.both(f"{THINK}I look.\n\n{CALL}", tools=TOOLS)
            assert (message.content, reason) == ("I look.", "tool_calls")
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            assert sum(bool(d.tool_calls) for d in deltas) > 4, "arguments are streamed"

            message, reason, _ = await t.both(f"{CALL}\n{CALL}", by_character=False, tools=TOOLS)
            assert message.content is None
            assert len(message.tool_calls) == 2

            message, reason, _ = await t.both(CALL)
            assert (message.content, message.tool_calls) == (CALL, None)
            for none in (dict(tools=TOOLS, tool_choice="none"), {}):
                message, reason, _ = await t.both(CALL, **none)
                assert (message.content, reason) == (CALL, "stop")

            keep = {"extra_body": {"separate_reasoning": False}}
            message, _, _ = await t.both(THINK + "Cold.", **keep)
            assert message.content == THINK + "Cold."
            assert not hasattr(message, "reasoning_content")

    asyncio.run(main())


HALF = '<tool_call>{"name": "we\\ud83d", "arguments": "\\ud800"}</tool_call>'


def test_half_a_character_in_a_call_breaks_nothing(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            message, reason, _ = await t.both(HALF, tools=TOOLS)
            assert reason == "tool_calls"
            assert message.tool_calls[0].function.name == "we\ufffd"

    asyncio.run(main())


def test_a_bug_in_the_middle_of_a_stream_is_an_error_that_clients_can_read(tmp_path, monkeypatch):
    def push(self, text):
        raise RuntimeError("a bug")

    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            monkeypatch.setattr("nanoactor.server.choices.ChatChoice.push", push)
            t.script.say("Hello.")
            ask = dict(model="m", messages=ASK)
            stream = await t.client.chat.completions.create(**ask, stream=True)
            with pytest.raises(openai.APIError, match="internal error"):
                [chunk async for chunk in stream]
            with pytest.raises(openai.InternalServerError, match="internal error"):
                await t.client.chat.completions.create(**ask)
            monkeypatch.undo()
            text = t.server.metrics.text().decode()
            assert 'outcome="broken_off",path="/v1/chat/completions"} 1.0' in text
            assert 'outcome="5xx",path="/v1/chat/completions"} 1.0' in text

    asyncio.run(main())


def test_a_call_that_is_cut_by_its_length_says_so(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            message, reason, _ = await t.both(CALL, tools=TOOLS, max_tokens=CALL.index('o"}}'))
            assert reason == "length"
            assert message.tool_calls[0].function.arguments == '{"city": "Osl'

    asyncio.run(main())


def test_the_result_of_a_call_goes_back_to_the_model(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            message, _, _ = await t.both(f"{THINK}I look.\n\n{CALL}", tools=TOOLS)
            answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "cold"}
            conversation = [*ASK, message.model_dump(), answer]
            params = dict(messages=conversation, tools=TOOLS)
            found, _, _ = await t.both("Cold.", **params)
            assert found.content == "Cold."
            asked = dict(messages=conversation, tools=TOOLS)
            tokens = await t.client.post("../tokenize", body=asked, cast_to=dict)
            text = await t.client.post(
                "../detokenize", body={"tokens": tokens["tokens"]}, cast_to=dict
            )
            for part in ('"weather"', '{"city": "Oslo"}', "cold", "<tool_response>", "So:"):
                assert part in text["prompt"], text["prompt"]

    asyncio.run(main())


OPENED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""


def test_a_template_that_opens_the_thoughts_itself(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch, template=OPENED) as t:
            message, _, _ = await t.both("Hm.\n</think>\n\nCold.")
            assert (message.reasoning_content, message.content) == ("Hm.", "Cold.")
            plain = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            message, _, _ = await t.both("Cold.", **plain)
            assert message.content == "Cold."
            able = (await t.client.models.retrieve("m")).capabilities
            assert able["reasoning"] is True
            for begun, opened in (("<think>\nWell", True), ("<think>a</think>Co", False)):
                messages = [*ASK, {"role": "assistant", "content": begun}]
                on = {"extra_body": {"continue_final_message": True}}
                message, _, _ = await t.both("x</think>y", messages=messages, **on)
                expected = "y" if opened else "x</think>y"
                assert message.content == expected

    asyncio.run(main())


def test_the_server_may_leave_thoughts_in_the_content(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch, config={"separate_reasoning": False}) as t:
            message, _, _ = await t.both(THINK + "Cold.")
            assert message.content == THINK + "Cold."
            separate = {"extra_body": {"separate_reasoning": True}}
            message, _, _ = await t.both(THINK + "Cold.", **separate)
            assert message.content == "Cold."

    asyncio.run(main())


def test_the_synchronous_client_sees_the_same(tmp_path, monkeypatch):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:

            def ask(stream):
                base = str(t.client.base_url)
                with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
                    found = client.chat.completions.create(
                        model="m", messages=ASK, tools=TOOLS, stream=stream
                    )
                    return list(found) if stream else found

            t.script.say(CALL)
            whole = await asyncio.to_thread(ask, False)
            assert whole.choices[0].message.tool_calls[0].function.name == "weather"
            t.script.say(CALL)
            chunks = await asyncio.to_thread(ask, True)
            assert chunks[-1].choices[0].finish_reason == "tool_calls"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_is_kept_where_parallel_ones_are_unwanted(tmp_path, monkeypatch, stream):
    async def main():
        async with talk(tmp_path, monkeypatch) as t:
            for parallel, count in ((True, 2), (False, 1)):
                t.script.say(CALL + CALL)
                found = await t.client.chat.completions.create(
                    model="m",
                    messages=ASK,
                    tools=TOOLS,
                    tool_choice="auto",
                    parallel_tool_calls=parallel,
                    stream=stream,
                )
                if stream:
                    deltas = [chunk.choices[0] async for chunk in found]
                    indices = [c.index for d in deltas for c in d.delta.tool_calls or ()]
                    assert set(indices) == set(range(count))
                    assert deltas[-1].finish_reason == "tool_calls"
                else:
                    assert len(found.choices[0].message.tool_calls) == count
                    assert found.choices[0].finish_reason == "tool_calls"

    asyncio.run(main())
