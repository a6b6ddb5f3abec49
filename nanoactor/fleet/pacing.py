"""Timing of the reports that a replica sends to the HTTP servers in front of it (ingresses): soon
after a stream starts or ends, and otherwise about twenty times a second."""

from __future__ import annotations

INTERVAL = 0.05
"""Time between reports on running streams, in seconds. A report costs the ingress and the replica
together nearly 1 ms of CPU time, whatever its size."""
URGENT_INTERVAL = 0.01
"""Time between reports if a stream has started, ended or been refused, in seconds."""
HEARTBEAT_INTERVAL = 1.0
"""Time after which a replica without anything to report sends a heartbeat, in seconds."""


class Pace:
    """Schedule of a replica's reports. It computes when the next one is due, depending on what
    there is to report."""

    def __init__(
        self,
        interval: float = INTERVAL,
        urgent_interval: float = URGENT_INTERVAL,
        heartbeat: float = HEARTBEAT_INTERVAL,
    ) -> None:
        self._interval, self._urgent_interval, self._heartbeat = (
            interval,
            min(urgent_interval, interval),
            heartbeat,
        )
        self._last = float("-inf")
        self._has_news = self._is_urgent = False

    def note(self, *, urgent: bool) -> None:
        """Record that there is something to report. `urgent` makes the report due earlier."""
        self._has_news = True
        self._is_urgent = self._is_urgent or urgent

    def note_report(self, now: float) -> None:
        """Record that a report was sent at the time `now`, in seconds."""
        self._last, self._has_news, self._is_urgent = now, False, False

    @property
    def due(self) -> float:
        """Time at which the next report is due, in seconds on the same clock as `now` of
        `note_report`."""
        if self._is_urgent:
            return self._last + self._urgent_interval
        return self._last + (self._interval if self._has_news else self._heartbeat)
