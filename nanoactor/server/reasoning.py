"""Parser that separates a model's reasoning from its content, in Qwen3's format:
`<think>…</think>`, and then the content.

The tags are dropped, as are the line breaks that Qwen3's chat template writes around reasoning and
content. Therefore, an answer that the client sends back in the next request renders to the same
tokens.
"""

from __future__ import annotations

import enum
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
OutputStart = Literal["none", "optional", "open", "content"]
"""How an output starts. "open": inside reasoning that the prompt has started. "content": inside
content that the prompt has started. "none" and "optional": the output itself shows whether it
starts with reasoning."""


def partial_tag_length(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is an incomplete start of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def ends_in_thoughts(text: str) -> bool:
    """Return True if a text starts with reasoning that is still open at its end."""
    return text.lstrip().startswith(OPEN) and CLOSE not in text


class HeldWhitespace:
    """Whitespace that is held back until the text after it shows how to treat it. It is kept apart
    from the text that is still to be scanned, so that it is scanned only once."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.length = 0
        """Number of characters held back."""

    def strip_start(self, text: str) -> str:
        """Hold back the whitespace at the start of `text`. Return the rest."""
        rest = text.lstrip()
        self._add(text[: len(text) - len(rest)])
        return rest

    def strip_end(self, text: str, characters: str | None = None) -> str:
        """Hold back the whitespace, or only the given `characters`, at the end of `text`. Return
        the text before it, after the whitespace held back so far. If there is no such text, return
        an empty string."""
        stripped = text.rstrip(characters)
        before = self.take() if stripped else ""
        self._add(text[len(stripped) :])
        return before + stripped

    def take(self) -> str:
        """Return the whitespace, and stop holding it back."""
        whitespace = "".join(self._parts)
        self._parts, self.length = [], 0
        return whitespace

    def _add(self, whitespace: str) -> None:
        if whitespace:
            self._parts.append(whitespace)
            self.length += len(whitespace)


class _State(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    BETWEEN = enum.auto()
    """After the reasoning, before the first character of content that is not a line break."""
    CONTENT = enum.auto()


class ReasoningParser:
    """Parser that separates reasoning from content in an output that arrives in pieces. The result
    does not depend on where the output is split."""

    def __init__(self, output_start: OutputStart = "optional") -> None:
        """Create the parser. `output_start` says how the output starts, as far as the prompt
        determines it."""
        self._prompt_opens_reasoning = output_start == "open"
        self._state = _State.CONTENT if output_start == "content" else _State.START
        self._held = HeldWhitespace()
        """Whitespace before the buffered text."""
        self._buffer = ""
        self._has_reasoning = False
        """True if any reasoning has been returned. Until then, leading line breaks are dropped."""

    @property
    def is_thinking(self) -> bool:
        """True if the text so far ends inside reasoning."""
        return self._state is _State.THINKING

    def push(self, text: str) -> tuple[str, str]:
        """Append text. Return the reasoning and the content that can be emitted now. Either may be
        empty."""
        if self._state is _State.CONTENT:
            return "", text
        self._buffer += text
        thoughts = content = ""
        if self._state is _State.START:
            content = self._start()
        if self._state is _State.THINKING:
            thoughts = self._think()
        if self._state is _State.BETWEEN:
            content, self._buffer = self._buffer.lstrip("\n"), ""
            if content:
                self._state = _State.CONTENT
        return thoughts, content

    def _start(self) -> str:
        """Determine whether the output starts with reasoning. If it does not, return the text so
        far, which is content."""
        self._buffer = start = self._held.strip_start(self._buffer)
        if OPEN.startswith(start) and start != OPEN:  # the tag may be incomplete
            return ""
        whitespace = self._held.take()
        if start.startswith(OPEN):
            self._state, self._buffer = _State.THINKING, start[len(OPEN) :]
        elif self._prompt_opens_reasoning:
            self._state, self._buffer = _State.THINKING, whitespace + start
        else:
            self._state, self._buffer = _State.CONTENT, ""
            return whitespace + start
        return ""

    def _think(self) -> str:
        if not self._has_reasoning:
            self._buffer = self._buffer.lstrip("\n")
        thoughts, closed, rest = self._buffer.partition(CLOSE)
        if closed:
            self._state, self._buffer = _State.BETWEEN, rest
            return self._held.strip_end(thoughts, "\n")
        certain = len(self._buffer) - partial_tag_length(self._buffer, CLOSE)
        thoughts = self._held.strip_end(self._buffer[:certain], "\n")
        self._buffer = self._buffer[certain:]
        self._has_reasoning = self._has_reasoning or bool(thoughts)
        return thoughts

    def finish(self) -> tuple[str, str]:
        """Return the remaining reasoning and content at the end of the output. Either may be
        empty."""
        rest, self._buffer = self._buffer, ""
        if self._state is _State.THINKING:
            return self._held.strip_end(rest, "\n"), ""
        if self._state is _State.START:
            rest = self._held.take() + rest
            return (rest.strip("\n"), "") if self._prompt_opens_reasoning else ("", rest)
        return "", ""
