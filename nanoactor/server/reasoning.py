"""Parser that separates a model's reasoning from its content, in Qwen3's format: `<think>…</think>`
first.

The tags are dropped, as are the line breaks that Qwen3's chat template writes around reasoning and
content. An answer that is sent back with the next question therefore renders to the same prompt
again.
"""

from __future__ import annotations

import enum
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
Begin = Literal["none", "optional", "open", "said"]
"""How an output starts: "open" within reasoning that the prompt has opened, "said" within content
that the prompt has started. For "none" and "optional", the output itself shows whether it starts
with reasoning."""


def held_back(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def ends_in_thoughts(text: str) -> bool:
    """Return True if an output that starts with this text is still in its reasoning."""
    return text.lstrip().startswith(OPEN) and CLOSE not in text


class _Where(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    BETWEEN = enum.auto()
    """After the reasoning, with only line breaks so far."""
    SAYING = enum.auto()


class ReasoningParser:
    """Parser of an output that arrives in pieces; the result does not depend on how it is split."""

    def __init__(self, begins: Begin = "optional") -> None:
        """`begins` is how the output starts, as far as its prompt determines it."""
        self._opened = begins == "open"
        self._where = _Where.SAYING if begins == "said" else _Where.START
        self._held = ""
        self._begun = False
        """Whether any reasoning has been emitted. Line breaks before the first reasoning are
        dropped."""

    @property
    def thinking(self) -> bool:
        """Return True if the text so far ends within reasoning."""
        return self._where is _Where.THINKING

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the (reasoning, content) that can now be emitted."""
        if self._where is _Where.SAYING:
            return "", text
        self._held += text
        thoughts = content = ""
        if self._where is _Where.START:
            content = self._start()
        if self._where is _Where.THINKING:
            thoughts = self._think()
        if self._where is _Where.BETWEEN:
            content, self._held = self._held.lstrip("\n"), ""
            if content:
                self._where = _Where.SAYING
        return thoughts, content

    def _start(self) -> str:
        """Determine whether the output starts with reasoning; return the held text if it is
        content."""
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._where, self._held = _Where.THINKING, begin[len(OPEN) :]
        elif OPEN.startswith(begin):  # the tag may be incomplete
            return ""
        elif self._opened:
            self._where = _Where.THINKING
        else:
            self._where = _Where.SAYING
            content, self._held = self._held, ""
            return content
        return ""

    def _think(self) -> str:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        thoughts, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._where, self._held = _Where.BETWEEN, rest
            return thoughts.rstrip("\n")
        open_ = len(self._held) - held_back(self._held, CLOSE)
        thoughts = self._held[:open_].rstrip("\n")
        self._held = self._held[len(thoughts) :]
        self._begun = self._begun or bool(thoughts)
        return thoughts

    def finish(self) -> tuple[str, str]:
        """Return the (reasoning, content) that was held back, at the end of the output."""
        held, self._held = self._held, ""
        if self._where is _Where.THINKING:
            return held.rstrip("\n"), ""
        if self._where is _Where.START:
            return (held.strip("\n"), "") if self._opened else ("", held)
        return "", ""
