"""Every field that clients of OpenAI or vLLM send is honoured, refused or ignored on purpose."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import anthropic.types.beta.message_create_params as beta_params
import anthropic.types.message_create_params as message_params
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.embedding_create_params as embedding_create_params
import openai.types.responses.response_create_params as response_params
import pytest

from nanoactor.requests.params import REJECTED
from nanoactor.server.anthropic.request import CountTokensRequest, MessagesRequest
from nanoactor.server.chat_messages import conversation
from nanoactor.server.errors import APIError
from nanoactor.server.fields import FIELDS, TEMPLATE_FIELDS, WarnOnce, route_fields
from nanoactor.server.pooling.request import EmbeddingRequest, RerankRequest, ScoreRequest
from nanoactor.server.requests import (
    ChatRequest,
    CompletionRequest,
    Decoder,
    TokenizeRequest,
    sampling_params,
    template_options,
)
from nanoactor.server.responses.request import ResponsesRequest
from nanoactor.text.conversation import Forms, fit_messages
from tests.server.fields_table import table

KINDS = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "embeddings": EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
}
BODIES = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "completions": {"model": "m", "prompt": "a"},
    "responses": {"model": "m", "input": "a"},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "embeddings": {"model": "m", "input": "a"},
    "rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "score": {"model": "m", "text_1": "a", "text_2": "b"},
}

# Of vLLM 0.33's two protocols, and those that older versions had.
VLLM = json.loads(Path(__file__).with_name("vllm_fields.json").read_text())


def of_openai(module):
    """All that the official client may send."""
    return of_params(module, "CompletionCreateParams")


def of_params(module, stem):
    """The names in an official client's types."""
    found = set()
    for name in ("Base", "NonStreaming", "Streaming"):
        found |= set(getattr(module, f"{stem}{name}").__annotations__)
    return found


def test_every_field_of_all_schemas_stands_in_the_table():
    chat, text = route_fields("chat").keys(), route_fields("completions").keys()
    responses, messages = route_fields("responses").keys(), route_fields("messages").keys()
    assert not of_params(response_params, "ResponseCreateParams") - responses
    for module in (message_params, beta_params):
        assert not of_params(module, "MessageCreateParams") - messages
    vectors = route_fields("embeddings").keys()
    assert not set(embedding_create_params.EmbeddingCreateParams.__annotations__) - vectors
    assert not of_openai(chat_params) - chat
    assert not of_openai(completion_params) - text
    assert not {*VLLM["both"], *VLLM["chat"]} - chat
    assert not {*VLLM["both"], *VLLM["completions"]} - text


@pytest.mark.parametrize("route", KINDS)
def test_the_table_says_once_what_becomes_of_each(route):
    names = [field.name for field in FIELDS if route in field.routes]
    assert len(set(names)) == len(names)
    honoured = {name for name, field in route_fields(route).items() if field.status == "honoured"}
    assert honoured == set(KINDS[route].__struct_fields__)


def test_the_documentation_is_made_from_the_table():
    document = Path(__file__).parents[2] / "docs" / "server.md"
    assert table() in document.read_text(), "run python -m tests.server.fields_table"


def decode(route, strict=False, **extra):
    body = json.dumps({**BODIES[route], **extra}).encode()
    return Decoder(strict).decode(KINDS[route], body)


STATUS = [(route, f) for route in KINDS for f in route_fields(route).values()]


@pytest.mark.parametrize(("route", "field"), STATUS, ids=lambda v: getattr(v, "name", v))
def test_each_field_is_treated_as_the_table_says(route, field):
    if field.status == "honoured":
        assert hasattr(decode(route), field.name)
        return
    for value in (None, *field.neutral):
        for strict in (False, True):
            assert not hasattr(decode(route, strict, **{field.name: value}), field.name)
    if field.status == "ignored":
        decode(route, strict=True, **{field.name: {"any": ["thing"]}})
        return
    with pytest.raises(APIError, match=field.name) as caught:
        decode(route, **{field.name: {"any": ["thing"]}})
    assert (caught.value.status, caught.value.param) == (400, field.name)


NEW_PARAMETER = """
import dataclasses
from nanoactor.requests import params

@dataclasses.dataclass(frozen=True)
class More(params.SamplingParams):
    charm: float | None = None

params.SamplingParams = More
from nanoactor.server import fields, openapi, requests

for kind, more in ((requests.CompletionRequest, b'"prompt":"a"'), (requests.ChatRequest, CHAT)):
    body = requests.Decoder(strict=True).decode(kind, b'{"model":"m","charm":2,' + more + b"}")
    assert requests.sampling_params(body).charm == 2.0
    schema = openapi.document("m", False)["components"]["schemas"][kind.__name__]
    assert schema["properties"]["charm"]["anyOf"][0] == {"type": "number"}
for route in ("chat", "completions"):
    assert fields.route_fields(route)["charm"].status == "honoured"
"""


def test_a_parameter_of_the_engine_is_one_of_requests_without_being_named():
    chat = b'"messages":[{"role":"user","content":"a"}]'
    program = f"CHAT = {chat!r}\n{NEW_PARAMETER}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_the_engine_refuses_with_a_reason_requests_are_refused_with_it():
    for name, reason in REJECTED.items():
        assert name not in CompletionRequest.__struct_fields__ + ChatRequest.__struct_fields__
        for route in ("chat", "completions"):
            with pytest.raises(APIError) as caught:
                decode(route, **{name: 2})
            assert reason in caught.value.message


# -- what nobody knows --------------------------------------------------------------------

ODD = [
    (dict(no_such_thing=1), "no_such_thing"),
    (dict(messages=[{"role": "user", "content": "a", "parsed": {"a": 1}}]), "messages[*].parsed"),
    (
        dict(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}]),
        "messages[*].content[*].cache",
    ),
    (
        dict(
            messages=[
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "x",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}", "parsed": 1},
                        }
                    ],
                },
            ]
        ),
        "messages[*].tool_calls[*].function.parsed",
    ),
    (dict(stream_options={"include_usage": True, "chunks": 3}), "stream_options.chunks"),
]


@pytest.mark.parametrize(("extra", "path"), ODD, ids=[path for _, path in ODD])
def test_unknown_fields_are_ignored_with_one_warning_and_refused_where_it_is_strict(
    extra, path, caplog
):
    decoder, body = Decoder(), json.dumps({**BODIES["chat"], **extra}).encode()
    with caplog.at_level(logging.WARNING, "nanoactor.server"):
        for _ in range(3):
            decoder.decode(ChatRequest, body)
    assert len(caplog.records) == 1
    assert repr(path) in caplog.text
    with pytest.raises(APIError) as caught:
        Decoder(strict=True).decode(ChatRequest, body)
    assert re.sub(r"\[\d+\]", "[*]", caught.value.param) == path
    assert "not a known parameter" in caught.value.message


def test_what_goes_to_the_template_goes_as_it_was_written():
    """Members in their order, unknown ones with them: the template may read them."""
    tool = {"type": "function", "note": 1, "function": {"returns": {}, "name": "f", "x": None}}
    messages = [
        {"content": "a", "role": "user", "mood": {"b": 1, "a": [1.0, 2**60]}},
        ODD[3][0]["messages"][1],
    ]
    body = decode("chat", tools=[tool], messages=messages, no_such_thing=1)
    assert repr(conversation(body.raw["messages"])) == repr(messages)
    assert repr(template_options(body)["tools"]) == repr([tool])


def test_a_member_that_the_template_reads_is_no_unknown_one(caplog):
    messages = [{"role": "user", "content": "a", "mood": "glad"}]
    body = json.dumps({**BODIES["chat"], "messages": messages}).encode()
    reads = Decoder(strict=True, template_members=lambda: ("mood",))
    assert reads.decode(ChatRequest, body).raw["messages"] == messages
    assert not caplog.records


def test_biases_are_read_beside_what_is_ignored():
    """JSON has token ids as texts, and a body with an unknown field is read in a second way."""
    body = decode("chat", logit_bias={"5": 1}, store=False, no_such_thing=1, metadata={"a": "b"})
    assert sampling_params(body).logit_bias == {5: 1.0}


def test_unknown_fields_that_are_null_say_nothing(caplog):
    for strict in (False, True):
        decode("chat", strict, no_such_thing=None, messages=[BODIES["chat"]["messages"][0]])
    assert not caplog.records


@pytest.mark.parametrize("strict", [False, True])
def test_the_log_says_of_a_field_what_strict_would_do(caplog, strict):
    decode("chat", strict, store=True, messages=[BODIES["chat"]["messages"][0]])
    told = [record.getMessage() for record in caplog.records]
    assert told == ["requests have the field 'store', which is ignored"]


def test_a_count_takes_what_the_counted_request_has(caplog):
    body = {
        "max_tokens": 5,
        "stream": True,
        "temperature": 0,
        "messages": BODIES["messages"]["messages"],
    }
    Decoder(strict=True).decode(CountTokensRequest, json.dumps(body).encode())
    assert not caplog.records


def test_hostile_names_neither_fill_the_memory_nor_the_log(caplog):
    warned = WarnOnce()
    with caplog.at_level(logging.WARNING, "nanoactor.server"):
        for number in range(5 * WarnOnce.MAX_NAMES):
            warned.warn(f"{number}" + "\n" * 1000, "is ignored")
    assert len(warned._names) == WarnOnce.MAX_NAMES
    assert len(caplog.records) == WarnOnce.MAX_NAMES + 1
    assert max(len(record.getMessage()) for record in caplog.records) < 400
    assert not any("\n" in record.getMessage() for record in caplog.records)


# -- what is said of values ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": ""}}, "videos"),
        ({"type": "file", "file": {"file_id": "x"}}, "files"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_parts_that_the_model_cannot_take_are_said_to_be_that(part, what, strict):
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    with pytest.raises(APIError, match=f"not accept {what}|{what} are not supported") as caught:
        decode("chat", strict, messages=messages)
    assert caught.value.param == "messages[1].content[1].type"


def test_what_was_refused_before_may_stand_in_the_history():
    messages = [
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "a", "name": "ann"},
    ]
    said = conversation(decode("chat", messages=messages).raw["messages"])
    fitted = fit_messages(said, Forms())
    assert [message.get("content") for message in fitted] == [None, "no", "a"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        (dict(messages=[{"role": "user", "content": "a"}, {"role": ""}]), "messages[1].role"),
        (dict(temperature="hot"), "temperature"),
        (dict(tools=[{"type": "function", "function": {}}]), "tools[0].function"),
        (dict(stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    ],
)
def test_the_whole_path_of_the_offender_is_named(extra, param):
    with pytest.raises(APIError) as caught:
        decode("chat", **extra)
    assert caught.value.param == param


def test_options_without_effect_are_accepted():
    decode("chat", tool_choice="auto")
    decode("chat", tool_choice="auto", tools=[])
    decode("chat", stream_options={"include_usage": True})
    decode("chat", stream_options={})


def test_fields_for_templates_reach_those_that_read_them():
    body = decode("chat", reasoning_effort="low", verbosity="high")
    assert template_options(body) == {}
    assert template_options(body, ("reasoning_effort",)) == {"reasoning_effort": "low"}
    assert template_options(body, TEMPLATE_FIELDS) == {
        "reasoning_effort": "low",
        "verbosity": "high",
        "enable_thinking": True,
    }
    body = decode("chat", reasoning_effort="none", chat_template_kwargs={"verbosity": "low"})
    assert template_options(body, ("enable_thinking", "verbosity")) == {
        "enable_thinking": False,
        "verbosity": "low",
    }
    body = decode("chat", enable_thinking=False)
    assert template_options(body, ("enable_thinking",)) == {"enable_thinking": False}


def test_tokenizing_ignores_what_it_does_not_know_too():
    body = {"messages": BODIES["chat"]["messages"], "return_token_strs": False, "other": 1}
    assert Decoder().decode(TokenizeRequest, json.dumps(body).encode()).messages
    with pytest.raises(APIError):
        Decoder(strict=True).decode(TokenizeRequest, json.dumps(body).encode())


@pytest.mark.parametrize("name", ["chat_template", "mm_processor_kwargs", "return_token_strs"])
def test_tokenizing_refuses_what_would_change_its_answer(name):
    def decode_tokenize(**extra):
        body = json.dumps({"messages": BODIES["chat"]["messages"], **extra}).encode()
        return Decoder().decode(TokenizeRequest, body)

    with pytest.raises(APIError, match=name):
        decode_tokenize(**{name: {"a": 1}})
    decode_tokenize(**{name: None})
    effort = decode_tokenize(reasoning_effort="none", add_special_tokens=False)
    assert template_options(effort, ("enable_thinking",)) == {"enable_thinking": False}
