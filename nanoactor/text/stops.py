"""Detection of stop strings in streamed text. Text that may be the start of a stop string is held
back."""

from __future__ import annotations


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces. The result does not depend on where the
    text is split.

    The match that ends first is used, and the longest of several that end at the same position.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append text. Return the text that can no longer be part of a stop string. After a match,
        that is the text before the stop string, or, with `include`, up to its end."""
        if not self._stops:
            return text
        held = self._held + text
        match = self._first_match(held)
        if match is not None:
            end, stop = match
            self.matched, self._held = stop, ""
            return held[:end] if self._include else held[: end - len(stop)]
        held_length = self._partial_match_length(held)
        self._held = held[len(held) - held_length :]
        return held[: len(held) - held_length]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        ends = [
            (text.find(stop_string) + len(stop_string), -len(stop_string), stop_string)
            for stop_string in self._stops
            if stop_string in text
        ]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _partial_match_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the start of a stop string."""
        max_size = max(len(stop) for stop in self._stops) - 1
        for size in range(min(max_size, len(text)), 0, -1):
            suffix = text[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """Return the text that is held back. Call this after the last piece."""
        held, self._held = self._held, ""
        return held
