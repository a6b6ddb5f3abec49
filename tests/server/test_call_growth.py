"""Parsers of answers take time in proportion to the text, whatever a model writes."""

import functools

import pytest

from nanoactor.server.json_calls import LlamaCalls, MistralCalls
from nanoactor.server.tool_calls import CallsAfterReasoning, ToolCallParser
from nanoactor.server.xml_calls import QwenCoderCalls
from tests.growth import growth

SCHEMA = {"f": {"properties": {"a": {"type": "object"}, "s": {"type": "string"}}}}
JSON_CALL = '{"name": "f", "arguments": {}}'
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
    "a number of Qwen3-Coder's": (
        lambda: QwenCoderCalls({"f": {"properties": {"a": {"type": "number"}}}}),
        lambda size: "<function=f><parameter=a>" + "1" * size + "x</parameter>",
    ),
    "tags of Hermes'": (ToolCallParser, lambda size: "<tool_call>{" * (size // 12)),
    "strings of Hermes' that nothing closes": (
        ToolCallParser,
        lambda size: '<tool_call>{\\"</tool_call>' * (size // 26),
    ),
}
SPACES = {
    "thoughts in the content": (lambda: CallsAfterReasoning("optional"), [""]),
    "Hermes'": (
        ToolCallParser,
        ["", "a", "<tool_call>", f"<tool_call>{JSON_CALL}</tool_call>"],
    ),
    "Qwen3-Coder's": (
        lambda: QwenCoderCalls(SCHEMA),
        [
            *("", "a", "<tool_call>", "<function=f>", "<function=f><parameter=s>a</parameter>"),
            *("<function=f></function>", "<function=f></function></tool_call>"),
        ],
    ),
    "Llama's": (
        LlamaCalls,
        ["", "a", "<|python_tag|>", JSON_CALL, f"{JSON_CALL};", f"{JSON_CALL} a"],
    ),
    "Mistral's": (
        MistralCalls,
        [
            *("", "a", "[TOOL_CALLS]", "[TOOL_CALLS][", f"[TOOL_CALLS][{JSON_CALL},"),
            *(f"[TOOL_CALLS][{JSON_CALL}]", "[TOOL_CALLS]f{}"),
        ],
    ),
}
"""For each form, texts after which a model may write space without end."""


def feed(make, text, size=1):
    """Feed a new parser in pieces of `size` characters."""
    parser = make()
    for at in range(0, len(text), size):
        parser.push(text[at : at + size])
    parser.finish()


@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_the_text_takes_four_times_the_time(shape):
    make, text = SHAPES[shape]
    small, large = (functools.partial(feed, make, text(size << 10)) for size in (8, 32))
    assert growth(small, large, 9) < 9


@pytest.mark.parametrize(
    ("form", "before"), [(form, before) for form, (_, texts) in SPACES.items() for before in texts]
)
def test_four_times_the_space_takes_four_times_the_time(form, before):
    """In pieces of four characters, scanning the space again and again takes longer than all
    else."""
    make = SPACES[form][0]
    small, large = (
        functools.partial(feed, make, before + " " * (size << 10), 4) for size in (32, 128)
    )
    assert growth(small, large, 9) < 9
