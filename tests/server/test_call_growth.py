"""Parsers of answers take time in proportion to the text, whatever a model writes."""

import time

import pytest

from nanoactor.server.json_calls import LlamaCalls, MistralCalls
from nanoactor.server.tool_calls import ToolCallParser
from nanoactor.server.xml_calls import QwenCoderCalls

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


def seconds(make, text):
    """The least of three, in processor time, fed character by character."""
    found = []
    for _ in range(3):
        parser, begin = make(), time.process_time()
        for character in text:
            parser.push(character)
        parser.finish()
        found.append(time.process_time() - begin)
    return min(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_text_takes_twice_the_time(shape):
    make, text = SHAPES[shape]
    small, large = seconds(make, text(8 << 10)), seconds(make, text(32 << 10))
    assert large < 9 * max(small, 0.002), (small, large)
