"""Parser of tool calls in the syntax that Hermes and Qwen3 use:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Arguments are returned unchanged, as they arrive. If the text after an opening tag is not a call, it
stays text. Whitespace around calls is dropped.
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
from nanoactor.server.reasoning import HeldWhitespace, OutputStart, partial_tag_length

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MAX_HEADER_CHARACTERS = 1024
"""Maximum number of characters before the arguments of a call. If there are more, the call is not
streamed, but returned at its end."""
_MAX_UNCLOSED_STRINGS = 32
"""Maximum number of calls with an unclosed string in an output. Each requires parsing the rest of
the output again. From the next such call on, the output is text."""
# Matches the start of a call up to its arguments, which are an object or a string.
_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=[{"])', re.DOTALL
)


_SPACE, _COLON, _COMMA = re.compile(r"\s*"), re.compile(r"\s*:\s*"), re.compile(r"\s*,?\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The start of a function call. `index` counts the calls of the output from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of call number `index`, as JSON text."""

    index: int
    text: str


Piece = str | Call | Arguments
"""Piece of a parsed output: text, the start of a call, or a part of a call's arguments."""


class CallFinder(Protocol):
    """Interface of the parsers that find tool calls in an output, one for each syntax."""

    def new_id(self) -> str:
        """Return a new, random id for a call."""

    def push(self, text: str) -> list[Piece]:
        """Append text. Return what can be emitted now, in order: text, starts of calls, and
        arguments."""

    def finish(self) -> list[Piece]:
        """Return the remaining text, calls and arguments at the end of the output."""


def new_id() -> str:
    """Return a new, random id for a call, in the format of OpenAI's API."""
    return f"call_{secrets.token_hex(12)}"


class CallStateMachine(abc.ABC):
    """Base class of parsers for text that arrives in pieces. A parser is a state machine: each step
    consumes as much buffered text as it can, and returns True if another step can run."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = HeldWhitespace()
        """Whitespace before the buffered text."""
        self._buffer = ""
        self._has_text_since_call = True
        """True if text has followed the last call. Whitespace directly after a call is dropped."""

    def new_id(self) -> str:
        """Return a new, random id for a call."""
        return new_id()

    def push(self, text: str) -> list[Piece]:
        """Append text. Return what can be emitted now, in order: text, starts of calls, and
        arguments."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    @abc.abstractmethod
    def _advance(self, pieces: list[Piece]) -> bool:
        """Run the step of the current state, adding to `pieces`. Return True if another step can
        run."""

    def _emit_text_up_to(self, end: int, pieces: list[Piece]) -> None:
        """Emit the buffered text before the index `end`. Hold back the whitespace at its end."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._emit_text(self._held.strip_end(text), pieces)

    def _emit_text(self, text: str, pieces: list[Piece]) -> None:
        if not self._has_text_since_call:
            text = text.lstrip()
        self._has_text_since_call = self._has_text_since_call or bool(text)
        if text:
            pieces.append(text)


class _State(enum.Enum):
    TEXT = enum.auto()
    HEADER = enum.auto()
    """After an opening tag, before the arguments of a call in the usual form, with the name
    first."""
    UNUSUAL = enum.auto()
    """Inside a call in another form, which is held back until its end."""
    OBJECT = enum.auto()
    STRING = enum.auto()
    """Inside arguments that are a string with an encoded object. They are held back until their
    end, because a piece may end inside an escape sequence."""
    TAIL = enum.auto()
    """After the arguments, before the brace that closes the call."""
    NEXT = enum.auto()
    """After the call's closing brace, before a tag, or before another call if the tags are
    missing."""


class ToolCallParser(CallStateMachine):
    """Parser of tool calls in `<tool_call>` tags. The result does not depend on where the text is
    split into pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.TEXT
        self._whitespace = ""
        """Whitespace before the last opening tag. It is part of the text if no call follows."""
        self._parts: list[str] = []
        """Parts of a held-back call that have been scanned. They are not scanned again, so that the
        cost is linear in the length of the call."""
        self._depth = 0
        self._quoted = self._escaped = False
        self._steps = {
            _State.TEXT: self._text,
            _State.HEADER: self._header,
            _State.UNUSUAL: self._unusual_call,
            _State.OBJECT: self._object,
            _State.STRING: self._string,
            _State.TAIL: self._tail,
            _State.NEXT: self._next,
        }

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._steps[self._state](pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        at = self._buffer.find(OPEN)
        if at >= 0:
            self._emit_text_up_to(at, pieces)
            self._whitespace = self._held.take()
            self._state, self._buffer = _State.HEADER, self._buffer[len(OPEN) :]
            return True
        certain = len(self._buffer) - partial_tag_length(self._buffer, OPEN)
        self._emit_text_up_to(certain, pieces)
        return False

    def _header(self, pieces: list[Piece]) -> bool:
        self._buffer = self._held.strip_start(self._buffer)
        if not self._buffer:
            return False
        if not self._buffer.startswith("{"):  # the tag was only mentioned in text
            self._state = _State.TEXT
            self._emit_text(self._whitespace + OPEN, pieces)
            return True
        max_characters = max(_MAX_HEADER_CHARACTERS - self._held.length, 0)
        header = _HEADER.match(self._buffer[:max_characters])
        end = self._buffer.find(CLOSE)
        name = decode_json_string(header[1]) if header else None
        if header and name and not 0 <= end <= header.end() - len(CLOSE):
            self._held.take()
            self._begin_call(name, pieces)
            self._buffer = self._buffer[header.end() :]
            self._state = _State.OBJECT if self._buffer.startswith("{") else _State.STRING
            return True
        if end < 0 and len(self._buffer) < max_characters:
            return False
        self._state, self._parts = _State.UNUSUAL, [self._held.take()]
        self._quoted = self._escaped = False
        return True

    def _unusual_call(self, pieces: list[Piece]) -> bool:
        """Hold a call back until the first closing tag that is not inside a string."""
        for at, character in enumerate(self._buffer):
            if self._in_string(character) or character != "<":
                continue
            if self._buffer.startswith(CLOSE, at):
                raw = "".join(self._parts) + self._buffer[:at]
                self._state, self._buffer = _State.TEXT, self._buffer[at + len(CLOSE) :]
                self._parts = []
                self._emit_whole_call(raw, CLOSE, pieces)
                return True
            if CLOSE.startswith(self._buffer[at:]):  # the closing tag may be incomplete
                self._parts.append(self._buffer[:at])
                self._buffer = self._buffer[at:]
                return False
        self._parts.append(self._buffer)
        self._buffer = ""
        return False

    def _emit_whole_call(self, raw: str, close: str, pieces: list[Piece]) -> None:
        """Emit a held-back call. If the text is not a call, emit it as text, with its tags."""
        call = decode_call(raw)
        if call is None:
            self._emit_text(f"{self._whitespace}{OPEN}{raw}{close}", pieces)
            return
        name, arguments = call
        self._begin_call(name, pieces)
        pieces.append(Arguments(self.calls - 1, arguments))

    def _begin_call(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._has_text_since_call = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def _object(self, pieces: list[Piece]) -> bool:
        """Emit the arguments up to the closing brace, or up to the point where the call is cut
        off."""
        end = self._end_of_object()
        passed = self._buffer if end is None else self._buffer[:end]
        if passed:
            pieces.append(Arguments(self.calls - 1, passed))
        self._buffer = self._buffer[len(passed) :]
        if end is None:
            return False
        self._state = _State.TAIL
        return True

    def _end_of_object(self) -> int | None:
        for at, character in enumerate(self._buffer):
            if self._in_string(character):
                continue
            if character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif character == "<":  # not JSON: the closing tag after an incomplete call
                return at
        return None

    def _in_string(self, character: str) -> bool:
        """Process a character. Return True if it is part of a string. The quotation marks count as
        parts."""
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
        """Hold a string back until its end, and then emit the arguments that it encodes."""
        for at, character in enumerate(self._buffer):
            self._in_string(character)
            if not self._quoted and not self._escaped:
                quoted = "".join(self._parts) + self._buffer[: at + 1]
                text = decode_json_string(quoted)
                pieces.append(Arguments(self.calls - 1, quoted if text is None else text))
                self._parts, self._buffer = [], self._buffer[at + 1 :]
                self._state = _State.TAIL
                return True
        self._parts.append(self._buffer)
        self._buffer = ""
        return False

    def _tail(self, pieces: list[Piece]) -> bool:
        """Skip the rest of a call after its arguments."""
        return self._skip_to(f"{CLOSE}|{OPEN}|}}")

    def _next(self, pieces: list[Piece]) -> bool:
        return self._skip_to(rf"{CLOSE}|{OPEN}|\{{")

    def _skip_to(self, marks: str) -> bool:
        match = re.search(marks, self._buffer)
        if match is None:
            keep = max(
                partial_tag_length(self._buffer, CLOSE), partial_tag_length(self._buffer, OPEN)
            )
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._state = {CLOSE: _State.TEXT, "}": _State.NEXT}.get(match[0], _State.HEADER)
        self._whitespace = ""
        self._buffer = self._buffer[match.start() if match[0] == "{" else match.end() :]
        return True

    def finish(self) -> list[Piece]:
        """Return the remaining text, calls and arguments at the end of the output."""
        pieces: list[Piece] = []
        for _ in range(_MAX_UNCLOSED_STRINGS):
            if not self._finish_once(pieces):
                return pieces
        if self._is_inside_call:
            self._state = _State.TEXT
            self._emit_text(self._whitespace + OPEN + self._take_rest(), pieces)
        else:
            self._finish_once(pieces)
        return pieces

    @property
    def _is_inside_call(self) -> bool:
        """True if the text ends inside a call none of which has been emitted."""
        return self._state in (_State.HEADER, _State.UNUSUAL)

    def _take_rest(self) -> str:
        rest = self._held.take() + "".join(self._parts) + self._buffer
        self._parts, self._buffer = [], ""
        return rest

    def _finish_once(self, pieces: list[Piece]) -> bool:
        """Emit what remains. If a quotation mark was not closed, so that a closing tag was mistaken
        for part of a string, emit only the text up to this tag, parse the text after it, and return
        True."""
        rest = self._take_rest()
        if self._state is _State.TEXT and (rest.strip() or not self.calls):
            self._emit_text(rest, pieces)
        elif self._is_inside_call:
            raw, close, rest = rest.partition(CLOSE)
            self._state = _State.TEXT
            self._emit_whole_call(raw, close, pieces)
            if close:
                pieces += self.push(rest)
                return True
        elif self._state is _State.STRING and rest:
            pieces.append(Arguments(self.calls - 1, rest))
        return False


class CallsAfterReasoning:
    """Parser of tool calls in an output whose reasoning is not separated. Calls inside the
    reasoning stay text.

    The result does not depend on where the output is split into pieces.
    """

    def __init__(self, output_start: OutputStart, calls: CallFinder | None = None) -> None:
        """Create the parser. `output_start` says how the output starts, as far as the prompt
        determines it. `calls` parses the text after the reasoning."""
        self._calls = calls or ToolCallParser()
        self._in_reasoning = {"open": True, "content": False}.get(output_start)
        """True while the output is in its reasoning; None until the output shows whether it is."""
        self._held = HeldWhitespace()
        """Whitespace before the buffered text."""
        self._buffer = ""

    def new_id(self) -> str:
        """Return a new, random id for a call."""
        return self._calls.new_id()

    def push(self, text: str) -> list[Piece]:
        """Append text. Return what can be emitted now, in order: text, starts of calls, and
        arguments."""
        if self._in_reasoning is False:
            return self._calls.push(text)
        self._buffer += text
        if self._in_reasoning is None:
            self._buffer = start = self._held.strip_start(self._buffer)
            if start != THOUGHTS and THOUGHTS.startswith(start):  # the tag may be incomplete
                return []
            self._in_reasoning = start.startswith(THOUGHTS)
            self._buffer = self._held.take() + start
        thoughts, closed, rest = self._buffer.partition(END_OF_THOUGHTS)
        if not self._in_reasoning:
            thoughts, closed, rest = "", "", self._buffer
        elif not closed:
            certain = len(self._buffer) - partial_tag_length(self._buffer, END_OF_THOUGHTS)
            thoughts, self._buffer = self._buffer[:certain], self._buffer[certain:]
            return [thoughts] if thoughts else []
        self._in_reasoning, self._buffer = False, ""
        reasoning = thoughts + closed
        return [*([reasoning] if reasoning else []), *self._calls.push(rest)]

    def finish(self) -> list[Piece]:
        """Return the remaining text, calls and arguments at the end of the output."""
        rest, self._buffer = self._held.take() + self._buffer, ""
        return [*([rest] if rest else []), *self._calls.finish()]


def decode_json_string(quoted: str) -> str | None:
    """Decode a JSON string. Return None if `quoted` is not one."""
    try:
        text = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return replace_surrogates(text) if isinstance(text, str) else None


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates. JSON escapes may contain surrogates, but
    UTF-8 cannot encode them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def decode_call(raw: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of a complete call. Return None if `raw` is not
    a call."""
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
    return replace_surrogates(name), replace_surrogates(arguments)


def _members(raw: str) -> dict[str, tuple[Any, str]]:
    """Return the members of a JSON object by name, each as its value and its original text. The
    text is needed because decoding and encoding may change a number. Raises `ValueError` if `raw`
    is not an object."""
    start = _SPACE.match(raw, 0)
    position = start.end() if start else 0
    if raw[position : position + 1] != "{":
        raise ValueError("it is not an object")
    json.JSONDecoder(strict=False, parse_constant=_reject_constant).decode(raw)
    members: dict[str, tuple[Any, str]] = {}
    decoder = json.JSONDecoder(strict=False)
    position += 1
    while (position := _skip(_SPACE, raw, position)) < len(raw) and raw[position] != "}":
        name, position = decoder.raw_decode(raw, position)
        value_start = _skip(_COLON, raw, position)
        value, position = decoder.raw_decode(raw, value_start)
        members[name] = value, raw[value_start:position]
        position = _skip(_COMMA, raw, position)
    return members


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
