"""Reading a body takes time in proportion to its size, whatever it is made of.

The server's loop reads it, and serves nobody else meanwhile. Each shape is read at one size and at
four times that size: processor time may grow eightfold, where a product of two lengths grows by 16.
"""

import functools
import json
import zlib
from base64 import urlsafe_b64encode

import pytest

import tests.growth
from nanoactor.server.anthropic.request import MessagesRequest
from nanoactor.server.anthropic.translate import to_chat as of_messages
from nanoactor.server.canonical import ArgumentOrder
from nanoactor.server.requests import MAX_ITEMS, ChatRequest, Decoder
from nanoactor.server.responses.request import ResponsesRequest
from nanoactor.server.responses.translate import Tools
from nanoactor.server.responses.translate import to_chat as of_responses
from nanoactor.server.sealed import seal
from nanoactor.server.translating import Options
from nanoactor.server.turns import Turns
from tests.growth import growth

FACTOR, MOST = 4, 8
LAST = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
BOMB = "nanoactor1." + urlsafe_b64encode(zlib.compress(b"a" * 4300)).decode()


def wide(count):
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def message(*blocks, role="user"):
    return {"role": role, "content": list(blocks)}


def messages(*said, tools=()):
    return MessagesRequest, {"max_tokens": 1, "messages": list(said), "tools": list(tools)}


def use(arguments):
    return {"type": "tool_use", "id": "t", "name": "f", "input": arguments}


def tool(schema, name="f"):
    return {"name": name, "input_schema": schema}


def shared(count, blocks):
    """As many blocks as an answer may have, in several messages."""
    rows = [blocks[at : at + MAX_ITEMS] for at in range(0, count, MAX_ITEMS)]
    return [message(*row, role="assistant") for row in rows] + [
        message({"type": "text", "text": "a"})
    ]


def responses(*items, tools=()):
    return ResponsesRequest, {
        "input": [*items, {"role": "user", "content": "a"}],
        "tools": [*tools],
    }


def call(name):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}


def function(name, schema=None):
    return {"type": "function", "name": name, "parameters": schema or {"type": "object"}}


SHAPES = {
    "objects of a wide schema": lambda n: messages(
        message(use({"a": [{} for _ in range(n)]}), role="assistant"),
        message(LAST),
        tools=[tool({"properties": {"a": {"items": wide(n)}}})],
    ),
    "calls of a wide tool": lambda n: messages(
        *shared(n, [use({}) for _ in range(n)]), tools=[tool(wide(n))]
    ),
    "a wide call": lambda n: messages(
        *shared(1, [use({f"p{k}": 1 for k in range(n)})]), tools=[tool(wide(n))]
    ),
    "results with images": lambda n: messages(
        message(
            *({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]} for _ in range(n))
        )
    ),
    "texts of an answer": lambda n: messages(
        *shared(n, [{"type": "text", "text": "a" * 40} for _ in range(n)])
    ),
    "sealed thoughts": lambda n: messages(
        *shared(n, [{"type": "thinking", "thinking": "", "signature": BOMB} for _ in range(n)])
    ),
    "thoughts of a response": lambda n: responses(
        *({"type": "reasoning", "encrypted_content": seal("Hm. " * 20)} for _ in range(n))
    ),
    "texts of a response": lambda n: responses(
        *({"role": "assistant", "content": "a" * 400} for _ in range(n))
    ),
    "calls of many functions": lambda n: responses(
        *(call(f"f{k}") for k in range(n)), tools=[function(f"f{k}") for k in range(n)]
    ),
    "outputs with images": lambda n: responses(
        *(
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "https://example.org/x.png"}],
            }
            for _ in range(n)
        )
    ),
    "a wide schema": lambda n: responses(tools=[function("f", wide(n))]),
}


def read(kind, body):
    """Read a body as the server does, up to what the engine is given."""
    decoder = Decoder(accepts_images=True)
    decoded = decoder.decode(kind, body)

    def warn(name, fate):
        raise AssertionError(name)

    if kind is MessagesRequest:
        made = of_messages(decoded, Options(accepts_images=True), warn)
    else:
        made = of_responses(
            decoded, Tools(decoded.tools or (), warn), Options(accepts_images=True), warn
        )
    chat = decoder.chat(made)
    assert isinstance(chat, ChatRequest)
    assert chat.constraint is None
    Turns().add(made["messages"], {"tools": made.get("tools")}, 1, 0, 16)
    return made


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reading_takes_time_in_proportion(shape):
    counts = MAX_ITEMS // FACTOR - 1, MAX_ITEMS - FACTOR
    bodies = [(kind, json.dumps(body).encode()) for kind, body in map(shape, counts)]
    small, large = (functools.partial(read, *body) for body in bodies)
    ratio = growth(small, large, MOST)
    assert ratio < MOST, f"{ratio:.1f} times as long"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_read_is_not_many_times_what_was_sent(shape):
    kind, body = shape(MAX_ITEMS - FACTOR)
    sent = json.dumps(body)
    assert len(json.dumps(read(kind, sent.encode()))) < 5 * len(sent)


def test_the_measure_finds_a_product(monkeypatch):
    ordered = ArgumentOrder._apply

    def quadratic(self, value, schema):
        names = schema.get("properties", {}) if isinstance(schema, dict) else {}
        assert len([name for name in names if name in value]) <= len(names)
        return ordered(self, value, schema)

    monkeypatch.setattr(ArgumentOrder, "_apply", quadratic)
    monkeypatch.setattr(tests.growth, "ROUNDS", 2)
    with pytest.raises(AssertionError, match="times as long"):
        test_reading_takes_time_in_proportion(SHAPES["objects of a wide schema"])
