"""Finds calls of functions in a model's text, in the form that Hermes and Qwen3 write:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Arguments are passed on as they come and as they stand. What is between the tags but no call stays
text. White space around calls is dropped.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any

from nanoactor.server.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LONGEST_HEADER = 4096
# Up to where an object or a string begins as the arguments.
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=[{"])', re.DOTALL
)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call begins."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of a call's arguments, JSON text."""

    index: int
    text: str


Piece = str | Call | Arguments


class _Where(enum.Enum):
    TEXT = enum.auto()
    HEADER = enum.auto()
    OBJECT = enum.auto()
    STRING = enum.auto()
    """Arguments that are an object in a string."""
    TAIL = enum.auto()


class ToolCallParser:
    """Feeds on pieces of text; what comes out does not depend on how the text is cut."""

    def __init__(self) -> None:
        self._where = _Where.TEXT
        self._held = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """What is certain now, in order."""
        self._held += text
        pieces: list[Piece] = []
        steps = {
            _Where.TEXT: self._text,
            _Where.HEADER: self._header,
            _Where.OBJECT: self._object,
            _Where.STRING: self._string,
            _Where.TAIL: self._tail,
        }
        while steps[self._where](pieces):
            pass
        return pieces

    # Each of these takes what it can from what is held, and says whether the next may go on.

    def _text(self, pieces: list[Piece]) -> bool:
        before, opened, rest = self._held.partition(OPEN)
        if opened:
            self._say(before.rstrip(), pieces)
            self._where, self._held = _Where.HEADER, rest
            return True
        certain = self._held[: len(self._held) - held_back(self._held, OPEN)].rstrip()
        self._held = self._held[len(certain) :]
        self._say(certain, pieces)
        return False

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self.calls:
            text = text.lstrip() if not self._said_since else text
            self._said_since = self._said_since or bool(text)
        if text:
            pieces.append(text)

    _said_since = False
    """Whether text has come after the last call."""

    def _header(self, pieces: list[Piece]) -> bool:
        header = _HEADER.match(self._held[:_LONGEST_HEADER])
        end = self._held.find(CLOSE)
        name = _text_of(header[1]) if header else None
        if header and name and not 0 <= end <= header.end() - len(CLOSE):
            self._call(name, pieces)
            self._held = self._held[header.end() :]
            self._where = _Where.OBJECT if self._held.startswith("{") else _Where.STRING
            return True
        if end < 0:
            return False
        raw, self._held = self._held[:end], self._held[end + len(CLOSE) :]
        self._where = _Where.TEXT
        self._whole(raw, CLOSE, pieces)
        return True

    def _whole(self, raw: str, close: str, pieces: list[Piece]) -> None:
        """A call whose order or form does not let its arguments be streamed, or no call."""
        call = _decoded(raw)
        if call is None:
            self._say(f"{OPEN}{raw}{close}", pieces)
            return
        name, arguments = call
        self._call(name, pieces)
        pieces.append(Arguments(self.calls - 1, arguments))

    def _call(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._said_since = False

    def _object(self, pieces: list[Piece]) -> bool:
        """Pass an object on, up to the brace that closes it."""
        for at, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    pieces.append(Arguments(self.calls - 1, self._held[: at + 1]))
                    self._where, self._held = _Where.TAIL, self._held[at + 1 :]
                    return True
        if self._held:
            pieces.append(Arguments(self.calls - 1, self._held))
            self._held = ""
        return False

    def _string(self, pieces: list[Piece]) -> bool:
        """Hold a string until it ends: its escapes may be cut anywhere."""
        quoted = re.match(r'"(?:[^"\\]|\\.)*"', self._held, re.DOTALL)
        if quoted is None:
            return False
        text = _text_of(quoted[0])
        pieces.append(Arguments(self.calls - 1, quoted[0] if text is None else text))
        self._where, self._held = _Where.TAIL, self._held[quoted.end() :]
        return True

    def _tail(self, pieces: list[Piece]) -> bool:
        """Drop what is left of a call; a model may forget to close one before the next."""
        found = re.search(f"{CLOSE}|{OPEN}", self._held)
        if found is None:
            keep = max(held_back(self._held, CLOSE), held_back(self._held, OPEN))
            self._held = self._held[len(self._held) - keep :]
            return False
        self._held = self._held[found.end() :]
        self._where = _Where.TEXT if found[0] == CLOSE else _Where.HEADER
        return True

    def finish(self) -> list[Piece]:
        """What was held back, as nothing follows."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._where is _Where.TEXT and (held.strip() or not self.calls):
            self._say(held, pieces)
        elif self._where is _Where.HEADER:
            self._whole(held, "", pieces)
        elif self._where is _Where.STRING and held:
            pieces.append(Arguments(self.calls - 1, held))
        return pieces


def _text_of(quoted: str) -> str | None:
    try:
        text = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _decoded(raw: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call that is complete; None where it is none."""
    try:
        call: Any = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return call["name"], arguments
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments or {}, ensure_ascii=False)
