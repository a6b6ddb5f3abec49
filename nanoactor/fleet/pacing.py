"""The pace of reports: soon for first tokens and ends, else some twenty times a second."""

from __future__ import annotations

INTERVAL = 0.05
"""Seconds between reports of streams that are under way: each costs ingress and replica together
nearly a millisecond of a core, whatever is in it."""
SOON = 0.01
"""... and if one has started or ended, or is refused."""
BEAT = 1.0
"""Seconds after which a replica with nothing to report sends a heartbeat."""


class Pace:
    """Timing of the next report, by what waits to be reported."""

    def __init__(self, interval: float = INTERVAL, soon: float = SOON, beat: float = BEAT) -> None:
        self._interval, self._soon, self._beat = interval, min(soon, interval), beat
        self._last = float("-inf")
        self._waits = self._is_urgent = False

    def note(self, *, urgent: bool) -> None:
        """Note that something waits to be reported."""
        self._waits = True
        self._is_urgent = self._is_urgent or urgent

    def reported(self, now: float) -> None:
        """Note that everything waiting was reported."""
        self._last, self._waits, self._is_urgent = now, False, False

    @property
    def due(self) -> float:
        """Return when the next report is due, in seconds of the same clock."""
        if self._is_urgent:
            return self._last + self._soon
        return self._last + (self._interval if self._waits else self._beat)
