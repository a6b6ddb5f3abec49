"""Parsers of answers take time in proportion to the text, whatever a model writes."""

import functools

import pytest

from nanoactor.server.json_calls import LlamaCalls, MistralCalls
from nanoactor.server.tool_calls import ToolCallParser
from nanoactor.server.xml_calls import QwenCoderCalls
from tests.growth import growth

SCHEMA = {"f": {"properties": {"a": {"type": "object"}, "s": {"type": "string"}}}}
SHAPES = {
    "a value of Qwen3-Coder's": (
        lambda: QwenCoderCalls(SCHEMA),
        lambda size: '<function=f>\n<parameter=a>\n{"x": "' + "y" * size,
    ),
    "a text of Qwen3-Coder's": (
        lambda: QwenCoderCalls(SCHEMA),
        lambda size: "<function=f>\n<parameter=s>\n" + "a\n" * (size // 2),
    ),
    "a name of Mistral's": (
        MistralCalls,
        lambda size: ("[TOOL_CALLS]a" + " " * 1010) * (size >> 10),
    ),
    "an id of Mistral's": (
        MistralCalls,
        lambda size: ("[TOOL_CALLS]a [CALL_ID]" + "w" * 500 + " " * 500) * (size >> 10),
    ),
    "objects of Llama's": (LlamaCalls, lambda size: "{" * size),
    "tags of Llama's": (LlamaCalls, lambda size: '<|python_tag|>{"a": 1}' * (size // 22)),
    "marks of Mistral's": (MistralCalls, lambda size: "[TOOL_CALLS]" * (size // 12)),
    "tags of Hermes'": (ToolCallParser, lambda size: "<tool_call>{" * (size // 12)),
}


def feed(make, text):
    """Feed a new parser character by character."""
    parser = make()
    for character in text:
        parser.push(character)
    parser.finish()


@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_the_text_takes_four_times_the_time(shape):
    make, text = SHAPES[shape]
    small, large = (functools.partial(feed, make, text(size << 10)) for size in (8, 32))
    assert growth(small, large, 9) < 9
