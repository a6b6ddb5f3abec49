"""The device's time on the host's clock."""

from __future__ import annotations

import time

from nanoactor.models.devices.protocols import Device, TimedEvent

_WINDOW = 256
_WAKE_NS = 30_000
"""How long a thread that waits for the device takes to notice, at the least."""
_LONG_NS = 1e9
"""Over longer gaps the clocks drift apart, and what an event says loses digits."""


class DeviceClock:
    """Adds up the times between events, and corrects the sum by what the host sees.

    How long a step took is the device's word; when it was follows from the gaps between steps. The
    two clocks drift apart slowly. The host never sees an event before it has happened, and in one
    of many steps it sees it at once: that bounds the drift from both sides.
    """

    def __init__(self, reference: TimedEvent) -> None:
        """`reference` has just been passed."""
        self._reference = reference
        self._now = float(time.monotonic_ns())
        self._least = float("inf")
        self._seen = 0

    @classmethod
    def started(cls, device: Device) -> DeviceClock:
        """Begin now, with a device that has nothing to do."""
        reference = device.timed_event()
        reference.record()
        reference.wait()
        return cls(reference)

    def step(self, begin: TimedEvent, end: TimedEvent) -> tuple[int, int]:
        """Return when a step began and ended, ns of the monotonic clock; `end` was just waited for.

        `begin` and `end` must be in the order of steps; `end` must live until the next call.
        """
        seen = time.monotonic_ns()
        length = begin.milliseconds_until(end) * 1e6
        gap = self._reference.milliseconds_until(begin) * 1e6
        if gap > _LONG_NS:
            self._now = seen - _WAKE_NS - length - gap
        ended = self._now + gap + length
        ended += self._correction(seen - ended)
        self._reference, self._now = end, ended
        return round(ended - length), round(ended)

    def _correction(self, late: float) -> float:
        """By how much the clock has proved wrong."""
        self._least = min(self._least, late)
        self._seen += 1
        shift = 0.0
        if late < 0:  # the host has seen what had not happened
            shift = late
        elif self._seen == _WINDOW:
            shift = max(0.0, self._least - _WAKE_NS)
        if shift or self._seen == _WINDOW:
            self._least, self._seen = float("inf"), 0
        return shift
