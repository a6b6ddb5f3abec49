"""Timing of reports: soon after a stream starts or ends, otherwise about twenty times a second."""

from __future__ import annotations

INTERVAL = 0.05
"""Seconds between reports on running streams. Each report costs the ingress and the replica
together nearly a millisecond of CPU time, whatever it contains."""
SOON = 0.01
"""Seconds between reports if a stream has started, has ended or was refused."""
BEAT = 1.0
"""Seconds after which a replica with nothing to report sends a heartbeat."""


class Pace:
    """Timing of the next report, which depends on what there is to report."""

    def __init__(self, interval: float = INTERVAL, soon: float = SOON, beat: float = BEAT) -> None:
        self._interval, self._soon, self._beat = interval, min(soon, interval), beat
        self._last = float("-inf")
        self._waits = self._is_urgent = False

    def note(self, *, urgent: bool) -> None:
        """Record that there is something to report."""
        self._waits = True
        self._is_urgent = self._is_urgent or urgent

    def reported(self, now: float) -> None:
        """Record that a report was sent at time `now`, in seconds."""
        self._last, self._waits, self._is_urgent = now, False, False

    @property
    def due(self) -> float:
        """Return the time at which the next report is due, on the same clock as `reported`."""
        if self._is_urgent:
            return self._last + self._soon
        return self._last + (self._interval if self._waits else self._beat)
