"""Finds stop strings in a stream of text, and holds back text that may be the beginning of one."""

from __future__ import annotations


class StopMatcher:
    """Searches pieces of text for stop strings; the result does not depend on where the text is
    split.

    The match that ends first wins; of several that end at the same position, the longest.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append text; return the text that may be emitted. After a match, this is the text up to
        the stop string, including it if `include` was set."""
        if not self._stops:
            return text
        held = self._held + text
        end = self._first_end(held)
        if end is not None:
            stop_at, stop = end
            self.matched, self._held = stop, ""
            return held[:stop_at] if self._include else held[: stop_at - len(stop)]
        keep = self._longest_open(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _first_end(self, text: str) -> tuple[int, str] | None:
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _longest_open(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the beginning of a stop
        string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """Return the text that is still held back at the end of the output."""
        held, self._held = self._held, ""
        return held
