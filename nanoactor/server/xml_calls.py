"""Parser of function calls in the form that Qwen3-Coder writes:

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value is the text between its tags; one line break at each end is dropped, if present. The
function's schema lists the allowed types of the value. As in vLLM, they are tried in the order
null, integer, number, boolean, object, array; the first that fits is used, and string otherwise.
Strings are forwarded as they arrive. The result does not depend on how the output is split.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.server.reasoning import held_back
from nanoactor.server.tool_calls import (
    CLOSE,
    OPEN,
    Arguments,
    Call,
    Piece,
    SteppedCalls,
    whole_characters,
)

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"
_ENDS = re.compile(r"\n?</parameter>|\n(?=<parameter=|</function>)")
"""The end of a value: its closing tag or, if that was omitted, a tag that starts a line."""
_ANY_END = (f"\n{END_OF_PARAMETER}", END_OF_PARAMETER, f"\n{PARAMETER}", f"\n{END_OF_FUNCTION}")
_LONGEST_END = max(map(len, _ANY_END))
_LONGEST_NAME = 256
_KINDS = {"null", "integer", "number", "boolean", "object", "array", "string"}


class QwenCoderCalls(SteppedCalls):
    """Parser of the XML calls of Qwen3-Coder in a text that arrives in pieces."""

    def __init__(self, schemas: Mapping[str, Any] | None = None) -> None:
        """`schemas` are the schemas of the functions' arguments, by function name."""
        super().__init__()
        self._schemas = schemas or {}
        self._space = ""
        self._name = ""
        self._tagged = False
        self._count = 0
        """Number of parameters of the current call so far."""
        self._kinds: frozenset[str] = frozenset()
        self._parts: list[str] = []
        """Parts of the current value, if it is held until its end."""
        self._begun = False
        """Whether the start of the current value has been processed. A leading line break is
        dropped."""
        self._step: Callable[[list[Piece]], bool] = self._text

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._step(pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        places = [(at, tag) for tag in (OPEN, FUNCTION) if (at := self._held.find(tag)) >= 0]
        if places:
            at, tag = min(places)
            said = self._held[:at].rstrip()
            self._say(said, pieces)
            self._space, self._tagged = self._held[len(said) : at], tag == OPEN
            self._held = self._held[at + len(OPEN) * self._tagged :]
            self._step = self._opening
            return True
        keep = max(held_back(self._held, OPEN), held_back(self._held, FUNCTION))
        certain = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(certain) :]
        self._say(certain, pieces)
        return False

    def _opening(self, pieces: list[Piece]) -> bool:
        """Parse a function's name after its own tag, or after the opening tag of a call."""
        begin = self._held.lstrip()
        if not begin or (begin != FUNCTION and FUNCTION.startswith(begin)):
            return False
        if begin.startswith(FUNCTION):
            name, closed, rest = begin[len(FUNCTION) :].partition(">")
            is_name = len(name.strip()) > 0 and len(name) < _LONGEST_NAME and "\n" not in name
            if closed and is_name:
                self._open(name.strip(), rest, pieces)
                return True
            if not closed and "\n" not in name and len(name) < _LONGEST_NAME:
                return False
        mark = OPEN if self._tagged else self._held[: len(FUNCTION)]
        self._held = self._held[0 if self._tagged else len(mark) :]
        self._say(self._space + mark, pieces)  # the tag was only mentioned in text
        self._step = self._text
        return True

    def _open(self, name: str, rest: str, pieces: list[Piece]) -> None:
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._said_since, self._name, self._count, self._held = False, name, 0, rest
        self._step = self._parameters

    def _argue(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Arguments(self.calls - 1, text))

    def _parameters(self, pieces: list[Piece]) -> bool:
        """Parse the tag of the next parameter, or the end of the function."""
        begin = self._held.lstrip()
        tags = (PARAMETER, END_OF_FUNCTION, CLOSE)
        if not begin or any(begin != tag and tag.startswith(begin) for tag in tags):
            return False
        if begin.startswith(PARAMETER):
            body = begin[len(PARAMETER) :]
            key, closed, rest = body.partition(">")
            if not closed and len(key) < _LONGEST_NAME:
                return False
            if len(key) >= _LONGEST_NAME:
                key, rest = body[:_LONGEST_NAME], body[_LONGEST_NAME:]
            self._held = rest
            self._begin_value(key.strip(), pieces)
            return True
        self._argue("}" if self._count else "{}", pieces)
        self._held = begin.removeprefix(END_OF_FUNCTION)
        self._step = self._closing
        return True

    def _begin_value(self, key: str, pieces: list[Piece]) -> None:
        self._kinds, self._begun = _kinds(self._schemas.get(self._name), key), False
        comma = ", " if self._count else "{"
        self._count += 1
        is_text = self._kinds == {"string"}
        self._argue(f"{comma}{_json(key)}: " + ('"' if is_text else ""), pieces)
        self._step = self._text_value if is_text else self._value

    def _first_break(self) -> bool:
        """Drop the line break at the start of a value; return False if it may still arrive."""
        if not self._begun:
            if not self._held:
                return False
            # An empty value may have only one line break, which is both its first and its last.
            self._held = self._held.removeprefix("\n")
            self._begun = True
        return True

    def _text_value(self, pieces: list[Piece]) -> bool:
        if not self._first_break():
            return False
        end = _ENDS.search(self._held)
        if end is not None:
            self._argue(_json(self._held[: end.start()])[1:-1] + '"', pieces)
            self._held, self._step = self._held[end.end() :], self._parameters
            return True
        keep = max(
            1 if self._held.endswith("\n") else 0, *(held_back(self._held, t) for t in _ANY_END)
        )
        certain = self._held[: len(self._held) - keep]
        self._argue(_json(certain)[1:-1], pieces)
        self._held = self._held[len(certain) :]
        return False

    def _value(self, pieces: list[Piece]) -> bool:
        """Hold a value that is not a string until its end, then emit it as JSON."""
        if not self._first_break():
            return False
        end = _ENDS.search(self._held)
        if end is None:  # only text that may be part of an end is scanned again
            keep = min(len(self._held), _LONGEST_END)
            self._parts.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        value = "".join(self._parts) + self._held[: end.start()]
        self._parts = []
        self._argue(_coerced(value, self._kinds), pieces)
        self._held, self._step = self._held[end.end() :], self._parameters
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """Skip the closing tag of a call, if there is one."""
        begin = self._held.lstrip()
        if not begin or (begin != CLOSE and CLOSE.startswith(begin)):
            return False
        if begin.startswith(CLOSE):
            self._held = begin[len(CLOSE) :]
        self._step = self._text
        return True

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the output. The arguments of a call
        that is cut off within a value remain incomplete; a call that only lacks closing tags is
        completed."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._step == self._parameters:
            self._argue("}" if self._count else "{}", pieces)
        elif self._step == self._text_value:
            self._argue(_json(held)[1:-1], pieces)
        elif self._step == self._opening:
            self._say(self._space + (OPEN if self._tagged else "") + held, pieces)
        elif self._step == self._text and (held.strip() or not self.calls):
            self._say(held, pieces)
        return pieces


def _json(text: str) -> str:
    return json.dumps(whole_characters(text), ensure_ascii=False)


def _kinds(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; only "string" if the schema specifies
    none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    own = properties.get(key) if isinstance(properties, dict) else None
    return frozenset(_types(own)) or frozenset({"string"})


def _types(schema: Any, depth: int = 0) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    given = schema.get("type")
    several = given if isinstance(given, list) else [given]
    found = {one for one in several if isinstance(one, str) and one in _KINDS}
    choices = schema.get("enum")
    for value in choices if isinstance(choices, list) else ():
        found.add(_type_of(value))
    if "const" in schema:
        found.add(_type_of(schema["const"]))
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name, ()) if isinstance(schema.get(name), list) else ():
            found |= _types(one, depth + 1)
    return found


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def _coerced(text: str, kinds: frozenset[str]) -> str:
    """Return a value as JSON text of a type in `kinds` that it matches, or else as a string."""
    bare = text.strip()
    if "null" in kinds and bare.lower() == "null":
        return "null"
    if "integer" in kinds and re.fullmatch(r"[+-]?\d{1,300}", bare):
        return str(int(bare))
    if "number" in kinds and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", bare):
        number = float(bare)
        if math.isfinite(number):
            whole = number.is_integer() and abs(number) < 2**53
            return str(int(number)) if whole else json.dumps(number)
    if "boolean" in kinds and bare.lower() in ("true", "false", "1", "0"):
        return "true" if bare.lower() in ("true", "1") else "false"
    if kinds & {"object", "array"}:
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return _json(text)
        if isinstance(value, dict | list):
            return whole_characters(bare)
    return _json(text)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
