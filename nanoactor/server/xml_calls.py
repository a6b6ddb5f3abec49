"""Parser of tool calls in the syntax that Qwen3-Coder uses:

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value is the text between its tags, except for one line break at each end. The function's schema
lists the types that the value may have. As in vLLM, they are tried in the order null, integer,
number, boolean, object, array; a value that fits none of them is a string. Strings are returned as
they arrive. The result does not depend on where the text is split into pieces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.server.reasoning import partial_tag_length
from nanoactor.server.tool_calls import (
    CLOSE,
    OPEN,
    Arguments,
    Call,
    CallStateMachine,
    Piece,
    replace_surrogates,
)

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"
_VALUE_END = re.compile(r"\n?</parameter>|\n(?=<parameter=|</function>)")
"""The end of a value: its closing tag or, if that is missing, a tag at the start of a line."""
_VALUE_END_TAGS = (
    f"\n{END_OF_PARAMETER}",
    END_OF_PARAMETER,
    f"\n{PARAMETER}",
    f"\n{END_OF_FUNCTION}",
)
_MAX_END_CHARACTERS = max(map(len, _VALUE_END_TAGS))
_MAX_NAME_CHARACTERS = 256
_JSON_TYPES = {"null", "integer", "number", "boolean", "object", "array", "string"}


class QwenCoderCalls(CallStateMachine):
    """Parser of Qwen3-Coder's tool calls. The result does not depend on where the text is split
    into pieces."""

    def __init__(self, schemas: Mapping[str, Any] | None = None) -> None:
        """Create the parser. `schemas` maps each function's name to the JSON schema of its
        arguments."""
        super().__init__()
        self._schemas = schemas or {}
        self._whitespace = ""
        self._name = ""
        self._has_call_tag = False
        self._parameter_count = 0
        """Number of parameters in the current call so far."""
        self._value_types: frozenset[str] = frozenset()
        self._parts: list[str] = []
        """Parts of the current value, if it is held back until its end."""
        self._value_begun = False
        """True once the first character of the current value has arrived and a leading line break,
        if any, has been dropped."""
        self._step: Callable[[list[Piece]], bool] = self._text

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._step(pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        tags = [(at, tag) for tag in (OPEN, FUNCTION) if (at := self._buffer.find(tag)) >= 0]
        if tags:
            at, tag = min(tags)
            self._emit_text_up_to(at, pieces)
            self._whitespace, self._has_call_tag = self._held.take(), tag == OPEN
            self._buffer = self._buffer[len(OPEN) * self._has_call_tag :]
            self._step = self._opening
            return True
        keep = max(
            partial_tag_length(self._buffer, OPEN), partial_tag_length(self._buffer, FUNCTION)
        )
        self._emit_text_up_to(len(self._buffer) - keep, pieces)
        return False

    def _opening(self, pieces: list[Piece]) -> bool:
        """Parse a function's name after `<function=`, which may follow an opening tag."""
        self._buffer = self._held.strip_start(self._buffer)
        if self._buffer != FUNCTION and FUNCTION.startswith(self._buffer):
            return False
        if self._buffer.startswith(FUNCTION):
            name, closed, rest = self._buffer[len(FUNCTION) :].partition(">")
            is_name = (
                len(name.strip()) > 0 and len(name) < _MAX_NAME_CHARACTERS and "\n" not in name
            )
            if closed and is_name:
                self._open(name.strip(), rest, pieces)
                return True
            if not closed and "\n" not in name and len(name) < _MAX_NAME_CHARACTERS:
                return False
        mark = OPEN if self._has_call_tag else self._buffer[: len(FUNCTION)]
        self._buffer = self._buffer[0 if self._has_call_tag else len(mark) :]
        self._emit_text(self._whitespace + mark, pieces)  # the tag was only mentioned in text
        self._step = self._text
        return True

    def _open(self, name: str, rest: str, pieces: list[Piece]) -> None:
        self._held.take()
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._has_text_since_call, self._name, self._parameter_count, self._buffer = (
            False,
            name,
            0,
            rest,
        )
        self._step = self._parameters

    def _emit_arguments(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Arguments(self.calls - 1, text))

    def _parameters(self, pieces: list[Piece]) -> bool:
        """Parse the tag of the next parameter, or the end of the function."""
        self._buffer = self._buffer.lstrip()
        tags = (PARAMETER, END_OF_FUNCTION, CLOSE)
        if any(self._buffer != tag and tag.startswith(self._buffer) for tag in tags):
            return False
        if self._buffer.startswith(PARAMETER):
            body = self._buffer[len(PARAMETER) :]
            key, closed, rest = body.partition(">")
            if not closed and len(key) < _MAX_NAME_CHARACTERS:
                return False
            if len(key) >= _MAX_NAME_CHARACTERS:
                key, rest = body[:_MAX_NAME_CHARACTERS], body[_MAX_NAME_CHARACTERS:]
            self._buffer = rest
            self._begin_value(key.strip(), pieces)
            return True
        self._emit_arguments("}" if self._parameter_count else "{}", pieces)
        self._buffer = self._buffer.removeprefix(END_OF_FUNCTION)
        self._step = self._closing
        return True

    def _begin_value(self, key: str, pieces: list[Piece]) -> None:
        self._value_types, self._value_begun = (
            _parameter_types(self._schemas.get(self._name), key),
            False,
        )
        comma = ", " if self._parameter_count else "{"
        self._parameter_count += 1
        is_string = self._value_types == {"string"}
        self._emit_arguments(f"{comma}{_json_string(key)}: " + ('"' if is_string else ""), pieces)
        self._step = self._string_value if is_string else self._value

    def _drop_leading_break(self) -> bool:
        """Drop the line break at the start of a value. Return False if the first character has not
        arrived."""
        if not self._value_begun:
            if not self._buffer:
                return False
            # The line break of an empty value is both its first and its last character.
            self._buffer = self._buffer.removeprefix("\n")
            self._value_begun = True
        return True

    def _string_value(self, pieces: list[Piece]) -> bool:
        if not self._drop_leading_break():
            return False
        end = _VALUE_END.search(self._buffer)
        if end is not None:
            self._emit_arguments(_json_string(self._buffer[: end.start()])[1:-1] + '"', pieces)
            self._buffer, self._step = self._buffer[end.end() :], self._parameters
            return True
        keep = max(
            1 if self._buffer.endswith("\n") else 0,
            *(partial_tag_length(self._buffer, t) for t in _VALUE_END_TAGS),
        )
        certain = self._buffer[: len(self._buffer) - keep]
        self._emit_arguments(_json_string(certain)[1:-1], pieces)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _value(self, pieces: list[Piece]) -> bool:
        """Hold back a value that is not a string until its end, and then emit it as JSON."""
        if not self._drop_leading_break():
            return False
        end = _VALUE_END.search(self._buffer)
        if end is None:  # do not scan the rest of the text again
            keep = min(len(self._buffer), _MAX_END_CHARACTERS)
            self._parts.append(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        value = "".join(self._parts) + self._buffer[: end.start()]
        self._parts = []
        self._emit_arguments(_coerce(value, self._value_types), pieces)
        self._buffer, self._step = self._buffer[end.end() :], self._parameters
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """Skip the closing tag of a call, if there is one. Return False if more text is needed to
        decide."""
        self._buffer = self._buffer.lstrip()
        if self._buffer != CLOSE and CLOSE.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(CLOSE)
        self._step = self._text
        return True

    def finish(self) -> list[Piece]:
        """Return the remaining text and arguments at the end of the output. A call that lacks only
        closing tags is completed. If it is cut off inside a value, its arguments stay
        incomplete."""
        pieces: list[Piece] = []
        rest, self._buffer = self._held.take() + self._buffer, ""
        if self._step == self._parameters:
            self._emit_arguments("}" if self._parameter_count else "{}", pieces)
        elif self._step == self._string_value:
            self._emit_arguments(_json_string(rest)[1:-1], pieces)
        elif self._step == self._opening:
            self._emit_text(self._whitespace + (OPEN if self._has_call_tag else "") + rest, pieces)
        elif self._step == self._text and (rest.strip() or not self.calls):
            self._emit_text(rest, pieces)
        return pieces


def _json_string(text: str) -> str:
    return json.dumps(replace_surrogates(text), ensure_ascii=False)


def _parameter_types(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that the function's schema allows for the parameter `key`, or only
    "string" if the schema specifies none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    parameter_schema = properties.get(key) if isinstance(properties, dict) else None
    return frozenset(_types(parameter_schema)) or frozenset({"string"})


def _types(schema: Any, depth: int = 0) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {one for one in names if isinstance(one, str) and one in _JSON_TYPES}
    choices = schema.get("enum")
    for value in choices if isinstance(choices, list) else ():
        types.add(_type_of(value))
    if "const" in schema:
        types.add(_type_of(schema["const"]))
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name, ()) if isinstance(schema.get(name), list) else ():
            types |= _types(one, depth + 1)
    return types


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def _coerce(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON text of the first type in `types` that it fits, or as a JSON string if
    it fits none. The types are tried in the order null, integer, number, boolean, object or
    array."""
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return "null"
    if "integer" in types and re.fullmatch(r"[+-]?\d{1,300}", bare):
        return str(int(bare))
    if "number" in types and re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", bare):
        number = float(bare)
        if math.isfinite(number):
            is_integral = number.is_integer() and abs(number) < 2**53
            return str(int(number)) if is_integral else json.dumps(number)
    if "boolean" in types and bare.lower() in ("true", "false", "1", "0"):
        return "true" if bare.lower() in ("true", "1") else "false"
    if types & {"object", "array"}:
        try:
            value = json.loads(bare, parse_constant=_reject_constant)
        except (ValueError, RecursionError):
            return _json_string(text)
        if isinstance(value, dict | list):
            return replace_surrogates(bare)
    return _json_string(text)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
