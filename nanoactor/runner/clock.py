"""The device's time on the host's clock."""

from __future__ import annotations

import time

from nanoactor.models.device import TimedEvent

_WINDOW = 256
_WAKE_NS = 30_000
"""How long a thread that waits for the device takes to notice, at the least."""


class DeviceClock:
    """Adds up the times between events, and corrects the sum by what the host sees.

    Differences are exact to the device's resolution; the two clocks drift apart slowly. The host
    never sees an event before it has happened, and in one of many steps it sees it at once: that
    bounds the drift from both sides.
    """

    def __init__(self, reference: TimedEvent) -> None:
        """`reference` has just been passed."""
        self._reference = reference
        self._now = float(time.monotonic_ns())
        self._least = float("inf")
        self._seen = 0

    def step(self, begin: TimedEvent, end: TimedEvent) -> tuple[int, int]:
        """When a step began and ended, ns of the monotonic clock; `end` was just waited for.

        `begin` and `end` must be in the order of steps; `end` must live until the next call.
        """
        began = self._now + self._reference.milliseconds_until(begin) * 1e6
        ended = self._now + self._reference.milliseconds_until(end) * 1e6
        self._reference, self._now = end, ended
        return round(began), round(ended + self._correct(time.monotonic_ns() - ended))

    def _correct(self, late: float) -> float:
        """Shift the clock where it has proved wrong; returns by how much."""
        self._least = min(self._least, late)
        self._seen += 1
        shift = 0.0
        if late < 0:  # the host has seen what had not happened
            shift = late
        elif self._seen == _WINDOW:
            shift = max(0.0, self._least - _WAKE_NS)
        if shift or self._seen == _WINDOW:
            self._now += shift
            self._least, self._seen = float("inf"), 0
        return shift
