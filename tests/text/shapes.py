"""Conversations of every shape that clients send, for comparisons with transformers."""

from typing import Any

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b":1.0, "a": [1e3, "é"]}'},
}
OBJECT = {**CALL, "function": {"name": "f", "arguments": {"b": 1.0, "a": [1000.0, "é"]}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": '{"ok": true}'}
ASKS = {"role": "user", "content": "Was gibt es? 北京"}
TOOLS = [
    {
        "type": "function",
        "note": {"z": 1, "a": 2},
        "function": {
            "description": "<b>Wetter</b> & 'mehr'",
            "name": "f",
            "returns": {"type": "string"},
            "parameters": {
                "required": ["b"],
                "type": "object",
                "properties": {"b": {"type": "number", "default": 1.0}, "a": {"type": "array"}},
            },
            "strict": None,
        },
    },
]


def says(**members: Any) -> dict[str, Any]:
    """Return an assistant's message."""
    return {"role": "assistant", "content": "Es gibt", **members}


def parts(*texts: str) -> list[dict[str, str]]:
    """Return content of parts."""
    return [{"type": "text", "text": text} for text in texts]


PLAIN = {
    "one": [ASKS],
    "system": [{"role": "system", "content": "Kurz. <|im_end|>"}, ASKS],
    "turns": [ASKS, says(), {"role": "user", "content": "  und?\n"}],
    "ends with an answer": [ASKS, says()],
    "names": [{**ASKS, "name": "ann"}, says(name="bob"), ASKS],
    "nulls": [ASKS, says(tool_calls=None, refusal=None, audio=None, function_call=None), ASKS],
    "no calls": [ASKS, says(tool_calls=[]), ASKS],
    "unknown members": [{**ASKS, "mood": {"b": 1, "a": 2}}, says(annotations=[{"x": 1}]), ASKS],
    "thoughts": [ASKS, says(reasoning_content="tief"), ASKS],
    "thoughts by another name": [ASKS, says(reasoning="tief"), ASKS],
    "thoughts at the end": [ASKS, says(thinking="tief")],
    "thoughts in the content": [ASKS, says(content="<think>\ntief\n</think>\n\nja"), ASKS],
    "tags in the text": [{"role": "user", "content": "</think> <tool_call> <|image_pad|>"}],
    "empty": [{"role": "user", "content": ""}, says(content=""), ASKS],
    "own role": [ASKS, {"role": "critic", "content": "schlecht"}, ASKS],
}
"""Shapes of which every template reads the same forms."""
CALLS = {
    "an object": [ASKS, says(content="", tool_calls=[OBJECT]), RESULT],
    "two calls": [ASKS, says(content="", tool_calls=[OBJECT, OBJECT]), RESULT, RESULT, ASKS],
    "no content": [ASKS, {"role": "assistant", "tool_calls": [OBJECT]}, RESULT],
    "null content": [ASKS, says(content=None, tool_calls=[OBJECT]), RESULT],
    "calls and content": [ASKS, says(tool_calls=[OBJECT], reasoning_content="tief"), RESULT, ASKS],
}
TEXTS = {
    name: [
        {**m, "tool_calls": [CALL] * len(m["tool_calls"])} if m.get("tool_calls") else m
        for m in messages
    ]
    for name, messages in CALLS.items()
}
"""The same with arguments as JSON text, as OpenAI's API has them."""
PARTS = {
    "user": [{"role": "user", "content": parts("eins", "zwei")}],
    "system": [{"role": "system", "content": parts("eins")}, ASKS],
    "assistant": [ASKS, says(content=parts("eins", "zwei")), ASKS],
    "tool": [*CALLS["an object"][:2], {**RESULT, "content": parts("eins", "zwei")}],
    "empty": [{"role": "user", "content": []}],
}
