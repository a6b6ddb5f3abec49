"""Answers as events of the Messages and the Responses API: every cut of a text adds up to the same
answer, and the order of the events is that of the API's grammar."""

import base64
import json
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoactor.server.answer import Answer, EchoedPrompt
from nanoactor.server.anthropic.events import MessagesWriter
from nanoactor.server.choices import ChatChoice
from nanoactor.server.errors import APIError
from nanoactor.server.reasoning import ReasoningParser
from nanoactor.server.requests import ChatRequest
from nanoactor.server.responses.events import ResponsesWriter
from nanoactor.server.responses.request import InnerTool, ResponsesRequest, ResponsesTool
from nanoactor.server.responses.translate import Tools
from nanoactor.server.sealed import seal, unseal
from nanoactor.server.tool_calls import ToolCallParser
from tests.server.event_grammars import decoded, message_of, response_of

PROMPT, CACHED = 40, 32
THINK = "<think>\nOslo. A city.\n</think>\n\n"
ARGUMENTS = '{"city": "Oslo", "n": [1, {"a": "}"}]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TEXTS = {
    "nothing": "",
    "text": "Cold, ünd 北京.",
    "thoughts": THINK,
    "thoughts and text": f"{THINK}Cold.",
    "calls": f"{CALL}\n{OTHER}",
    "all": f"{THINK}I look.\n\n{CALL}\n{OTHER}\n\nSo.",
    "an open call": f"{THINK}I look.\n\n{CALL[:60]}",
    "open thoughts": THINK[:12],
}


def answer_of(pieces, reason="stop", stop_reason=None):
    """(an answer, the deltas of each of its outputs)."""
    body = ChatRequest(messages=[], model="m")
    answer = Answer(body, [EchoedPrompt(range(PROMPT))])
    answer.choices = [ChatChoice(0, ReasoningParser(), ToolCallParser())]
    deltas = []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        completion = CompletionOutput(0, piece, [1, 2])
        if last:
            completion.finish_reason, completion.stop_reason = reason, stop_reason
        output = RequestOutput(
            "r", None, [], [completion], last, RequestMetrics(0.0), CACHED if last else 0
        )
        deltas.append(lambda output=output: answer.process(0, output))
    return answer, deltas


TOOLS = [ResponsesTool("namespace", name="here", tools=[InnerTool("function", name="look")])]


def messages_writer(answer, **options):
    return MessagesWriter(answer, **options)


def responses_writer(answer, **options):
    body = ResponsesRequest(input="?", **options)
    return ResponsesWriter(answer, body, Tools(TOOLS, lambda name, fate: None))


def streamed(make, pieces, *end, **options):
    answer, outputs = answer_of(pieces, *end)
    writer = make(answer, **options)
    stream = writer.begin(answer.choices[0].begin())
    for output in outputs:
        stream += writer.push(output())
    return decoded(stream + writer.end())


def whole(make, pieces, *end, **options):
    answer, outputs = answer_of(pieces, *end)
    writer = make(answer, **options)
    answer.choices[0].begin()
    for output in outputs:
        writer.collect(output())
    return json.loads(msgspec.json.encode(writer.response()))


WAYS = {"messages": (messages_writer, message_of), "responses": (responses_writer, response_of)}


def without_ids(value):
    """A value without what is drawn for each answer."""
    if isinstance(value, dict):
        drawn = ("id", "call_id", "created_at", "completed_at", "usage")
        return {k: without_ids(v) for k, v in value.items() if k not in drawn}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_cut_in_two_and_single_characters_add_up_to_the_whole(way, text):
    make, added_up = WAYS[way]
    expected = whole(make, [text])
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in (*cuts, list(text) or [""]):
        found = added_up(streamed(make, pieces))
        assert without_ids(found) == without_ids(expected), pieces
        assert without_ids(whole(make, pieces)) == without_ids(expected), pieces


PARTS = st.sampled_from(
    [THINK, CALL, OTHER, "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "{"]
)


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(PARTS, max_size=8).map("".join), st.data())
def test_any_text_cut_anywhere_keeps_to_the_grammar(way, text, data):
    make, added_up = WAYS[way]
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    found = added_up(streamed(make, pieces))
    assert without_ids(found) == without_ids(whole(make, [text]))


def test_a_message_has_thoughts_text_and_calls_in_their_order():
    message = whole(messages_writer, [TEXTS["all"]])
    assert [block["type"] for block in message["content"]] == [
        *("thinking", "text", "tool_use", "tool_use", "text")
    ]
    thoughts, said, call, look, so = message["content"]
    assert (thoughts["thinking"], said["text"], so["text"]) == ("Oslo. A city.", "I look.", "So.")
    assert thoughts["signature"], "clients send no thoughts back without one"
    assert (call["name"], call["input"]["city"]) == ("weather", "Oslo")
    assert (look["name"], look["input"]) == ("look", {})
    assert call["id"] != look["id"]


def test_a_response_has_items_of_their_own_and_names_the_namespace():
    response = whole(responses_writer, [TEXTS["all"]])
    thoughts, said, call, look, so = response["output"]
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert thoughts["content"][0]["text"] == "Oslo. A city."
    assert [said["content"][0]["text"], so["content"][0]["text"]] == ["I look.", "So."]
    assert json.loads(call["arguments"])["city"] == "Oslo"
    assert "namespace" not in call
    assert (look["namespace"], look["name"]) == ("here", "look")


REASONS = [
    ("Cold.", "stop", None, "end_turn", "completed"),
    ("Cold.", "stop", "END", "stop_sequence", "completed"),
    ("Cold.", "stop", 17, "end_turn", "completed"),
    ("Cold.", "length", None, "max_tokens", "incomplete"),
    (CALL, "stop", None, "tool_use", "completed"),
    (CALL[:60], "length", None, "max_tokens", "incomplete"),
]


@pytest.mark.parametrize(("text", "reason", "stop", "of_messages", "of_responses"), REASONS)
def test_the_end_is_told_in_each_apis_words(text, reason, stop, of_messages, of_responses):
    message = whole(messages_writer, [text], reason, stop)
    assert message["stop_reason"] == of_messages
    assert message["stop_sequence"] == (stop if of_messages == "stop_sequence" else None)
    assert without_ids(message_of(streamed(messages_writer, [text], reason, stop))) == without_ids(
        message
    )
    response = response_of(streamed(responses_writer, [text], reason, stop))
    assert response["status"] == of_responses
    is_cut = of_responses == "incomplete"
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert response["output"][-1]["status"] == of_responses


CUT = CALL[: CALL.index('"Os') + 3]
BROKEN = [
    (CUT, "stop", "lo", "stop_sequence"),
    (CUT, "stop", None, "max_tokens"),
    (f"{OTHER}\n{CUT}", "stop", "lo", "stop_sequence"),
    (CUT, "length", None, "max_tokens"),
    (CALL.replace('"Oslo"', "NaN"), "stop", None, "max_tokens"),
    (CALL.replace('"Oslo"', "1e999"), "stop", None, "max_tokens"),
    (CALL, "stop", "lo", "tool_use"),
]


@pytest.mark.parametrize(("text", "reason", "stop", "expected"), BROKEN)
def test_a_call_that_is_not_whole_is_never_told_as_one_to_run(text, reason, stop, expected):
    message = whole(messages_writer, [text], reason, stop)
    assert message["stop_reason"] == expected
    assert message["stop_sequence"] == (stop if expected == "stop_sequence" else None)
    told = message_of(streamed(messages_writer, list(text), reason, stop))
    assert (told["stop_reason"], told["stop_sequence"]) == (expected, message["stop_sequence"])
    item = whole(responses_writer, [text], reason, stop)["output"][-1]
    assert item["status"] == ("completed" if expected == "tool_use" else "incomplete")


ESCAPES = '{"a\\udc00": "x\\ud83d", "b": ["\\ud83d\\ude00"]}'
HALVES = f'<tool_call>{{"name": "f", "arguments": {ESCAPES}}}</tool_call>'


def test_halves_of_characters_in_arguments_are_replaced():
    message = whole(messages_writer, [HALVES])
    assert message["content"][0]["input"] == {"a\ufffd": "x\ufffd", "b": ["\U0001f600"]}
    assert message["stop_reason"] == "tool_use"
    assert msgspec.json.encode(message)


def test_usage_has_each_apis_meaning():
    pieces = [THINK, "Cold."]
    usage = message_of(streamed(messages_writer, pieces))["usage"]
    assert usage == {
        "input_tokens": PROMPT - CACHED,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": CACHED,
        "output_tokens": 4,
    }
    assert response_of(streamed(responses_writer, pieces))["usage"] == {
        "input_tokens": PROMPT,
        "input_tokens_details": {"cached_tokens": CACHED},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": PROMPT + 4,
    }


def test_omitted_thoughts_come_sealed_and_can_be_read_again():
    events = streamed(messages_writer, list(TEXTS["all"]), omits_thoughts=True)
    thoughts = message_of(events)["content"][0]
    assert thoughts["thinking"] == ""
    assert unseal(thoughts["signature"]) == "Oslo. A city."
    assert not any("Oslo. A city" in json.dumps(event) for event in events)
    wanted = {"include": ["reasoning.encrypted_content"]}
    item = response_of(streamed(responses_writer, [TEXTS["all"]], **wanted))["output"][0]
    assert unseal(item["encrypted_content"]) == "Oslo. A city."
    assert (
        response_of(streamed(responses_writer, [THINK]))["output"][0]["encrypted_content"] is None
    )


@given(st.text())
def test_sealed_thoughts_are_read_as_they_were(text):
    expected = text.encode("utf-8", "replace").decode()
    sealed = seal(text)
    assert unseal(sealed) == expected
    assert sealed.isascii()


@pytest.mark.parametrize(
    "text", ["", "x", "nanoactor1.", "nanoactor1.é", "nanoactor1.AAAA", "EqRk"]
)
def test_what_was_not_sealed_here_is_nothing(text):
    assert unseal(text) is None
    assert unseal(seal("a" * 100)[:-9]) is None


def test_sealed_thoughts_cannot_fill_the_memory():
    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * 10**7)).decode()
    assert unseal("nanoactor1." + bomb) is None
    for text in ("a" * 100_000, "Hm. " * 50_000):
        assert unseal(seal(text)) == text


def test_an_error_ends_a_stream_in_each_apis_words():
    problem = APIError(503, "no memory is left")
    for make in (messages_writer, responses_writer):
        answer, outputs = answer_of(["Co", "ld"])
        writer = make(answer)
        stream = writer.begin(answer.choices[0].begin()) + writer.push(outputs[0]())
        last = decoded(stream + writer.error(problem))[-1]
        if make is messages_writer:
            error = {"type": "overloaded_error", "message": "no memory is left"}
            assert last == {"type": "error", "error": error, "request_id": None}
        else:
            assert last["type"] == "response.failed"
            assert last["response"]["status"] == "failed"
            assert last["response"]["error"]["message"] == "no memory is left"


def test_a_grammar_of_events_finds_what_is_out_of_order():
    events = streamed(messages_writer, ["Cold."])
    for broken in (events[1:], events[:-1], [*events[:3], *events[4:]], [*events, events[2]]):
        with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
            message_of(broken)
    events = streamed(responses_writer, ["Cold."])
    for at in range(1, len(events)):
        broken = [dict(event) for number, event in enumerate(events) if number != at]
        for number, event in enumerate(broken):
            event["sequence_number"] = number
        with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
            response_of(broken)
