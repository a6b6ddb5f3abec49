"""Parser of function calls in a model's output, in the form that Hermes and Qwen3 write:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Arguments are forwarded verbatim as they arrive. Text after an opening tag that is not a call
remains text. Whitespace around calls is dropped.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import json
import re
import secrets
from typing import Any, Protocol

from nanoactor.server.reasoning import CLOSE as END_OF_THOUGHTS
from nanoactor.server.reasoning import OPEN as THOUGHTS
from nanoactor.server.reasoning import Begin, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LONGEST_HEADER = 1024
"""Number of characters within which the arguments of a call must begin in order to be streamed."""
# Matches a call up to the beginning of its arguments, which are an object or a string.
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=[{"])', re.DOTALL
)


_SPACE, _COLON, _COMMA = re.compile(r"\s*"), re.compile(r"\s*:\s*"), re.compile(r"\s*,?\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Start of a function call."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Piece = str | Call | Arguments


class CallFinder(Protocol):
    """Interface of the parsers that find calls in a text, one for each form of calls."""

    def new_id(self) -> str:
        """Return an id for a call."""

    def push(self, text: str) -> list[Piece]:
        """Add text; return the pieces that can now be emitted, in order."""

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the output."""


def new_id() -> str:
    """Return an id for a call, in the format of OpenAI's API."""
    return f"call_{secrets.token_hex(12)}"


class SteppedCalls(abc.ABC):
    """State machine that parses a text in pieces. Each step consumes what it can of the held text
    and returns whether the next step can run."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._said_since = True
        """Whether text has followed the last call. Whitespace directly after a call is dropped."""

    def new_id(self) -> str:
        """Return an id for a call."""
        return new_id()

    def push(self, text: str) -> list[Piece]:
        """Add text; return the pieces that can now be emitted, in order."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    @abc.abstractmethod
    def _advance(self, pieces: list[Piece]) -> bool:
        """Run the current step; return True if the next step can run."""

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not self._said_since:
            text = text.lstrip()
        self._said_since = self._said_since or bool(text)
        if text:
            pieces.append(text)


class _Where(enum.Enum):
    TEXT = enum.auto()
    HEADER = enum.auto()
    """After an opening tag, up to the arguments of a call in the usual form."""
    UNUSUAL = enum.auto()
    """Within a call of another form, which is held until its end."""
    OBJECT = enum.auto()
    STRING = enum.auto()
    """Within arguments given as a string that contains an object. They are held, too, because
    pieces may split the string's escape sequences."""
    TAIL = enum.auto()
    """After the arguments, up to the brace that closes the call."""
    NEXT = enum.auto()
    """After that brace, up to a tag, or up to another call if the tags were omitted."""


class ToolCallParser(SteppedCalls):
    """Parser of calls in a text that arrives in pieces; the result does not depend on how it is
    split."""

    def __init__(self) -> None:
        super().__init__()
        self._where = _Where.TEXT
        self._space = ""
        """Whitespace before the last opening tag; part of the text if no call follows."""
        self._parts: list[str] = []
        """Scanned parts of a held call. They are not scanned again, so that the cost of a long call
        is not quadratic in its length."""
        self._depth = 0
        self._quoted = self._escaped = False
        self._steps = {
            _Where.TEXT: self._text,
            _Where.HEADER: self._header,
            _Where.UNUSUAL: self._unusual,
            _Where.OBJECT: self._object,
            _Where.STRING: self._string,
            _Where.TAIL: self._tail,
            _Where.NEXT: self._next,
        }

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._steps[self._where](pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        before, opened, rest = self._held.partition(OPEN)
        if opened:
            said = before.rstrip()
            self._say(said, pieces)
            self._space = before[len(said) :]
            self._where, self._held = _Where.HEADER, rest
            return True
        certain = self._held[: len(self._held) - held_back(self._held, OPEN)].rstrip()
        self._held = self._held[len(certain) :]
        self._say(certain, pieces)
        return False

    def _header(self, pieces: list[Piece]) -> bool:
        begin = self._held.lstrip()
        if not begin:
            return False
        if not begin.startswith("{"):  # the tag was only mentioned in text
            self._where = _Where.TEXT
            self._say(self._space + OPEN, pieces)
            return True
        header = _HEADER.match(self._held[:_LONGEST_HEADER])
        end = self._held.find(CLOSE)
        name = text_of(header[1]) if header else None
        if header and name and not 0 <= end <= header.end() - len(CLOSE):
            self._call(name, pieces)
            self._held = self._held[header.end() :]
            self._where = _Where.OBJECT if self._held.startswith("{") else _Where.STRING
            return True
        if end < 0 and len(self._held) < _LONGEST_HEADER:
            return False
        self._where = _Where.UNUSUAL
        self._quoted = self._escaped = False
        return True

    def _unusual(self, pieces: list[Piece]) -> bool:
        """Hold a call up to the first closing tag outside strings."""
        for at, character in enumerate(self._held):
            if self._in_string(character) or character != "<":
                continue
            if self._held.startswith(CLOSE, at):
                raw = "".join(self._parts) + self._held[:at]
                self._where, self._held = _Where.TEXT, self._held[at + len(CLOSE) :]
                self._parts = []
                self._whole(raw, CLOSE, pieces)
                return True
            if CLOSE.startswith(self._held[at:]):  # the closing tag may be incomplete
                self._parts.append(self._held[:at])
                self._held = self._held[at:]
                return False
        self._parts.append(self._held)
        self._held = ""
        return False

    def _whole(self, raw: str, close: str, pieces: list[Piece]) -> None:
        """Emit a call whose arguments could not be streamed because of its form, or the text if it
        is not a call."""
        call = decoded_call(raw)
        if call is None:
            self._say(f"{self._space}{OPEN}{raw}{close}", pieces)
            return
        name, arguments = call
        self._call(name, pieces)
        pieces.append(Arguments(self.calls - 1, arguments))

    def _call(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._said_since = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def _object(self, pieces: list[Piece]) -> bool:
        """Emit an object up to its closing brace, or up to the point where it is cut off."""
        end = self._end_of_object()
        passed = self._held if end is None else self._held[:end]
        if passed:
            pieces.append(Arguments(self.calls - 1, passed))
        self._held = self._held[len(passed) :]
        if end is None:
            return False
        self._where = _Where.TAIL
        return True

    def _end_of_object(self) -> int | None:
        for at, character in enumerate(self._held):
            if self._in_string(character):
                continue
            if character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif character == "<":  # not JSON: the closing tag of an incomplete call
                return at
        return None

    def _in_string(self, character: str) -> bool:
        """Process a character; return True if it belongs to a string, including the quotation
        marks."""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        else:
            return False
        return True

    def _string(self, pieces: list[Piece]) -> bool:
        """Hold a string until it ends, then emit the arguments in it."""
        for at, character in enumerate(self._held):
            self._in_string(character)
            if not self._quoted and not self._escaped:
                quoted = "".join(self._parts) + self._held[: at + 1]
                text = text_of(quoted)
                pieces.append(Arguments(self.calls - 1, quoted if text is None else text))
                self._parts, self._held = [], self._held[at + 1 :]
                self._where = _Where.TAIL
                return True
        self._parts.append(self._held)
        self._held = ""
        return False

    def _tail(self, pieces: list[Piece]) -> bool:
        """Drop the rest of a call."""
        return self._skip_to(f"{CLOSE}|{OPEN}|}}")

    def _next(self, pieces: list[Piece]) -> bool:
        return self._skip_to(rf"{CLOSE}|{OPEN}|\{{")

    def _skip_to(self, marks: str) -> bool:
        found = re.search(marks, self._held)
        if found is None:
            keep = max(held_back(self._held, CLOSE), held_back(self._held, OPEN))
            self._held = self._held[len(self._held) - keep :]
            return False
        self._where = {CLOSE: _Where.TEXT, "}": _Where.NEXT}.get(found[0], _Where.HEADER)
        self._space = ""
        self._held = self._held[found.start() if found[0] == "{" else found.end() :]
        return True

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the output."""
        pieces: list[Piece] = []
        held, self._held = "".join(self._parts) + self._held, ""
        if self._where is _Where.TEXT and (held.strip() or not self.calls):
            self._say(held, pieces)
        elif self._where in (_Where.HEADER, _Where.UNUSUAL):
            # If a quotation mark was left open, a closing tag was mistaken for a part of a string.
            raw, close, rest = held.partition(CLOSE)
            self._whole(raw, close, pieces)
            if close:
                self._where, self._parts = _Where.TEXT, []
                pieces += [*self.push(rest), *self.finish()]
        elif self._where is _Where.STRING and held:
            pieces.append(Arguments(self.calls - 1, held))
        return pieces


class CallsBehindThoughts:
    """Parser of calls in output that includes reasoning. Calls in the reasoning remain text.

    The result does not depend on how the output is split.
    """

    def __init__(self, begins: Begin, calls: CallFinder | None = None) -> None:
        """`begins` is how the output starts, if its prompt shows it; `calls` parses the text after
        the reasoning."""
        self._calls = calls or ToolCallParser()
        self._thinks = {"open": True, "said": False}.get(begins)
        """Whether the output is in its reasoning; None until the output shows it."""
        self._held = ""

    def new_id(self) -> str:
        """Return an id for a call."""
        return self._calls.new_id()

    def push(self, text: str) -> list[Piece]:
        """Add text; return the pieces that can now be emitted, in order."""
        if self._thinks is False:
            return self._calls.push(text)
        self._held += text
        if self._thinks is None:
            begin = self._held.lstrip()
            if begin != THOUGHTS and THOUGHTS.startswith(begin):  # the tag may be incomplete
                return []
            self._thinks = begin.startswith(THOUGHTS)
        thoughts, closed, rest = self._held.partition(END_OF_THOUGHTS)
        if not self._thinks:
            thoughts, closed, rest = "", "", self._held
        elif not closed:
            certain = len(self._held) - held_back(self._held, END_OF_THOUGHTS)
            thoughts, self._held = self._held[:certain], self._held[certain:]
            return [thoughts] if thoughts else []
        self._thinks, self._held = False, ""
        said = thoughts + closed
        return [*([said] if said else []), *self._calls.push(rest)]

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the output."""
        held, self._held = self._held, ""
        return [*([held] if held else []), *self._calls.finish()]


def text_of(quoted: str) -> str | None:
    """Return the text of a JSON string, or None if `quoted` is not one."""
    try:
        text = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return whole_characters(text) if isinstance(text, str) else None


def whole_characters(text: str) -> str:
    """Return the text with surrogate pairs joined and lone surrogates replaced. JSON escapes can
    write surrogates, but UTF-8 cannot encode them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def decoded_call(raw: str) -> tuple[str, str] | None:
    """Return the name of a complete call and its arguments as JSON text, or None if `raw` is not a
    call."""
    try:
        call = _members(raw)
    except (ValueError, RecursionError):
        return None
    name, _ = call.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        return None
    arguments, written = call.get("arguments", call.get("parameters", (None, "")))
    if arguments is not None and not isinstance(arguments, str | dict):
        return None
    if not isinstance(arguments, str):
        arguments = written if arguments else "{}"
    return whole_characters(name), whole_characters(arguments)


def _members(raw: str) -> dict[str, tuple[Any, str]]:
    """Return an object's members by name, each as its value and its original text, because decoding
    and encoding may change a number. Raises `ValueError` if `raw` is not an object."""
    at = _SPACE.match(raw, 0)
    place = at.end() if at else 0
    if raw[place : place + 1] != "{":
        raise ValueError("it is not an object")
    json.JSONDecoder(strict=False, parse_constant=_no_constant).decode(raw)
    found: dict[str, tuple[Any, str]] = {}
    reader = json.JSONDecoder(strict=False)
    place += 1
    while (place := _after(_SPACE, raw, place)) < len(raw) and raw[place] != "}":
        name, place = reader.raw_decode(raw, place)
        begin = _after(_COLON, raw, place)
        value, place = reader.raw_decode(raw, begin)
        found[name] = value, raw[begin:place]
        place = _after(_COMMA, raw, place)
    return found


def _after(mark: re.Pattern[str], text: str, at: int) -> int:
    found = mark.match(text, at)
    return found.end() if found else at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
