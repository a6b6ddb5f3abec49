"""Parsers of tool calls that models write as bare JSON objects, in the syntaxes of Llama 3 and
Mistral:

    {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": ...}
    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, ...]
    [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}

If the arguments are an object and follow the name, they are emitted as they arrive. The result does
not depend on where the text is split into pieces.
"""

from __future__ import annotations

import abc
import re
import secrets
import string
from collections.abc import Callable, Collection

from nanoactor.server.reasoning import partial_tag_length
from nanoactor.server.tool_calls import (
    Arguments,
    Call,
    CallStateMachine,
    Piece,
    decode_call,
    decode_json_string,
)

PYTHON_TAG, TOOL_CALLS, ARGS, CALL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MAX_HEADER_CHARACTERS = 1024
_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_NAMED = re.compile(r"([\w.-]{1,256}+)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_ALPHABET = string.ascii_letters + string.digits


class _ObjectEnd:
    """Finds the end of a JSON object whose text arrives in pieces."""

    def __init__(self, depth: int = 0) -> None:
        """Start the search. `depth` is the number of braces and brackets that are already open."""
        self._depth = depth
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the index after the object's closing brace, or None if the brace is not in `text`.
        Call this with each piece in turn."""
        for at, character in enumerate(text):
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
                if self._depth <= 0:
                    return at + 1
        return None


class _JsonCalls(CallStateMachine):
    """State machine that finds JSON objects that are calls. Subclasses determine where a call may
    start."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """Create the parser. `names` are the names of the functions; if empty, any name is
        accepted."""
        super().__init__()
        self._names = names
        self._parts: list[str] = []
        """Pieces of the object that is held back, because it may be a call."""
        self._end = _ObjectEnd()
        self._step: Callable[[list[Piece]], bool] = self._begin

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._step(pieces)

    @abc.abstractmethod
    def _begin(self, pieces: list[Piece]) -> bool:
        """Process the buffered text in the initial state. Return True if the next step can run."""

    @abc.abstractmethod
    def _after_object(self, was_call: bool) -> None:
        """Select the step after the end of an object. `was_call` is True if the object was a
        call."""

    def _mark(self) -> str:
        """Return the tag that preceded the buffered text, or an empty string. The tag is emitted as
        text if no call follows."""
        return ""

    def _candidate(self, pieces: list[Piece]) -> bool:
        """Decide how to process the object that starts here. A call in the usual form, with the
        name first, is started, so that its arguments can be streamed. Any other object is held back
        until its end. Return False if more text is needed to decide."""
        header = _HEADER.match(self._buffer[:_MAX_HEADER_CHARACTERS])
        if header is not None:
            name = decode_json_string(header[1])
            if name and self._is_known(name):
                self._open(name, self._buffer[header.end() :], self._tail, pieces)
                return True
        elif len(self._buffer) < _MAX_HEADER_CHARACTERS and _ObjectEnd().find(self._buffer) is None:
            return False
        self._end = _ObjectEnd()
        self._step = self._whole_object
        return True

    def _is_known(self, name: str) -> bool:
        return not self._names or name in self._names

    def _open(
        self, name: str, rest: str, tail: Callable[[list[Piece]], bool], pieces: list[Piece]
    ) -> None:
        """Start a call of the function `name`. `rest` is the buffered text from the arguments on,
        and `tail` is the step that follows the arguments."""
        pieces.append(Call(self.calls, name))
        self.calls += 1
        self._has_text_since_call = False
        self._end, self._outer, self._buffer = _ObjectEnd(), _ObjectEnd(depth=1), rest
        self._step, self._next = self._arguments, tail

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._end.find(self._buffer)
        passed = self._buffer if end is None else self._buffer[:end]
        if passed:
            pieces.append(Arguments(self.calls - 1, passed))
        self._buffer = self._buffer[len(passed) :]
        if end is None:
            return False
        self._step = self._next
        return True

    def _tail(self, pieces: list[Piece]) -> bool:
        """Skip the rest of the call's object: further members and the closing brace."""
        end = self._outer.find(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._after_object(True)
        return True

    def _whole_object(self, pieces: list[Piece]) -> bool:
        """Hold an object back until its end, because its members are in an unusual order or it may
        not be a call."""
        end = self._end.find(self._buffer)
        self._parts.append(self._buffer if end is None else self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        raw, self._parts = "".join(self._parts), []
        self._after_object(self._emit_object(raw, pieces))
        return True

    def _emit_object(self, raw: str, pieces: list[Piece]) -> bool:
        """Emit a complete object as a call, or else as text. Return True if it is a call."""
        call = decode_call(raw)
        if call is None or not self._is_known(call[0]):
            self._emit_text(raw, pieces)
            return False
        pieces += [Call(self.calls, call[0]), Arguments(self.calls, call[1])]
        self.calls += 1
        self._has_text_since_call = False
        return True

    def _text_up_to(
        self, mark: str, next_step: Callable[[list[Piece]], bool], pieces: list[Piece]
    ) -> bool:
        """Emit text up to a tag, without whitespace before the tag. Return True if the tag was
        found; `next_step` runs next in that case."""
        at = self._buffer.find(mark)
        if at >= 0:
            self._emit_text_up_to(at, pieces)
            self._held.take()
            self._step, self._buffer = next_step, self._buffer[len(mark) :]
            return True
        certain = len(self._buffer) - partial_tag_length(self._buffer, mark)
        self._emit_text_up_to(certain, pieces)
        return False

    def finish(self) -> list[Piece]:
        """Return the remaining text and calls at the end of the output."""
        pieces: list[Piece] = []
        rest, self._buffer = self._held.take() + "".join(self._parts) + self._buffer, ""
        self._parts = []
        if self._step in (self._arguments, self._tail):
            return []
        rest = self._mark() + rest
        if rest.strip() or not self.calls:
            self._emit_text(rest, pieces)
        return pieces


class LlamaCalls(_JsonCalls):
    """Parser of Llama 3's tool calls: JSON objects at the start of the output or after
    `<|python_tag|>`."""

    def _begin(self, pieces: list[Piece]) -> bool:
        self._buffer = self._held.strip_start(self._buffer)
        if self._buffer != PYTHON_TAG and PYTHON_TAG.startswith(self._buffer):
            return False
        if not self._buffer.startswith((PYTHON_TAG, "{")):
            self._step = self._text
            return True
        self._held.take()
        is_tagged = self._buffer.startswith(PYTHON_TAG)
        self._buffer = self._buffer.removeprefix(PYTHON_TAG)
        self._step = self._tagged if is_tagged else self._candidate
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        return self._text_up_to(PYTHON_TAG, self._tagged, pieces)

    def _tagged(self, pieces: list[Piece]) -> bool:
        """Process the text after a tag: a JSON object, or a Python program, which is emitted as
        text."""
        self._buffer = self._held.strip_start(self._buffer)
        if not self._buffer:
            return False
        self._held.take()
        self._step = self._candidate if self._buffer.startswith("{") else self._text
        return True

    def _after_object(self, was_call: bool) -> None:
        self._step = self._between if was_call else self._text

    def _between(self, pieces: list[Piece]) -> bool:
        """Skip separators between calls."""
        self._buffer = self._buffer.lstrip(" \t\r\n;,")
        if not self._buffer or (self._buffer != PYTHON_TAG and PYTHON_TAG.startswith(self._buffer)):
            return False
        if self._buffer.startswith(PYTHON_TAG):
            self._buffer = self._buffer[len(PYTHON_TAG) :]
        elif self._buffer.startswith("{"):
            self._step = self._candidate
        else:
            self._step = self._text
        return True


class MistralCalls(_JsonCalls):
    """Parser of Mistral's tool calls: after `[TOOL_CALLS]`, JSON objects, or a name followed by
    arguments."""

    def new_id(self) -> str:
        """Return a new call id of nine letters or digits, as Mistral's chat templates require."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _begin(self, pieces: list[Piece]) -> bool:
        return self._text_up_to(TOOL_CALLS, self._marked, pieces)

    def _marked(self, pieces: list[Piece]) -> bool:
        self._buffer = self._held.strip_start(self._buffer)
        if not self._buffer:
            return False
        self._held.take()
        self._in_list = self._buffer.startswith("[")
        if self._in_list:
            self._buffer, self._step = self._buffer[1:], self._between
        elif self._buffer.startswith("{"):
            self._step = self._candidate
        else:
            self._step = self._named
        return True

    def _named(self, pieces: list[Piece]) -> bool:
        """Parse a function's name, and the optional tags between the name and the arguments."""
        is_whole = "{" in self._buffer or len(self._buffer) >= _MAX_HEADER_CHARACTERS
        match = _NAMED.match(self._buffer[:_MAX_HEADER_CHARACTERS]) if is_whole else None
        if match is not None:
            self._open(match[1], self._buffer[match.end() :], self._after_arguments, pieces)
            return True
        if not is_whole:
            return False
        self._step = self._begin  # the tag was only mentioned in text
        self._emit_text(TOOL_CALLS, pieces)
        return True

    def _mark(self) -> str:
        return TOOL_CALLS if self._step == self._named else ""

    def _after_arguments(self, pieces: list[Piece]) -> bool:
        self._step = self._begin
        return True

    def _after_object(self, was_call: bool) -> None:
        self._step = self._between if self._in_list else self._begin

    def _between(self, pieces: list[Piece]) -> bool:
        """Skip separators between the calls of a list, and the end of the list."""
        self._buffer = self._buffer.lstrip(" \t\r\n,")
        if not self._buffer:
            return False
        if self._buffer.startswith("{"):
            self._step = self._candidate
        else:
            self._buffer = self._buffer.removeprefix("]")
            self._step = self._begin
        return True
