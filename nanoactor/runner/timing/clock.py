"""Conversion of device times to the host's monotonic clock."""

from __future__ import annotations

import time

from nanoactor.models.devices.protocols import Device, TimedEvent

_WINDOW = 256
_WAKE_NS = 30_000
"""Minimum time in ns that a thread takes to wake up after it has waited for the device."""
_LONG_NS = 1e9
"""Maximum gap between steps, in ns, that is measured with events. Over longer gaps the clocks drift
apart, and event times lose precision."""


class DeviceClock:
    """Sums the times between events, and corrects the sum by observations on the host.

    The device reports the duration of a step and of the gap before it, from which the step's start
    follows. The clocks of device and host drift apart slowly. The host never observes an event
    before it has happened, and in at least one of many steps it observes the event immediately.
    This bounds the drift from both sides.
    """

    def __init__(self, reference: TimedEvent) -> None:
        """Start the clock at `reference`, an event that has just completed."""
        self._reference = reference
        self._now = float(time.monotonic_ns())
        self._least = float("inf")
        self._seen = 0

    @classmethod
    def started(cls, device: Device) -> DeviceClock:
        """Return a clock that starts now; the device must be idle."""
        reference = device.timed_event()
        reference.record()
        reference.wait()
        return cls(reference)

    def step(self, begin: TimedEvent, end: TimedEvent) -> tuple[int, int]:
        """Return a step's start and end in ns of the monotonic clock; `end` has just completed.

        Steps must come in order. `end` must not be recorded again before the next call.
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
        """Return the correction in ns to add to the clock. `late` is the host's time minus the
        clock's time."""
        self._least = min(self._least, late)
        self._seen += 1
        shift = 0.0
        if late < 0:  # the host saw the event before the clock's time
            shift = late
        elif self._seen == _WINDOW:
            shift = max(0.0, self._least - _WAKE_NS)
        if shift or self._seen == _WINDOW:
            self._least, self._seen = float("inf"), 0
        return shift
