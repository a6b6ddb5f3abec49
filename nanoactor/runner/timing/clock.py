"""Conversion of device times to the host's monotonic clock."""

from __future__ import annotations

import time

from nanoactor.models.devices.protocols import Device, TimedEvent

_WINDOW = 256
_WAKE_NS = 30_000
"""Minimum time, in ns, from an event on the device until a thread that waits for it wakes up."""
_MAX_GAP_NS = 1e9
"""Maximum gap between steps, in ns, that is measured with events. Over longer gaps, the clocks
drift apart and event times lose precision."""


class DeviceClock:
    """Converts the times between device events to times of the host's monotonic clock, and corrects
    them by when the host observes the events.

    The device reports the duration of a step and of the gap before it, from which the step's start
    follows. The clocks of device and host drift apart slowly. The host never observes an event
    before it has happened, and it observes at least one of many events immediately. This bounds the
    drift from both sides.
    """

    def __init__(self, reference: TimedEvent) -> None:
        """Start the clock at `reference`, an event that has just completed."""
        self._reference = reference
        self._now = float(time.monotonic_ns())
        self._min_lag = float("inf")
        self._num_seen = 0

    @classmethod
    def started(cls, device: Device) -> DeviceClock:
        """Return a clock that starts now. The device must be idle."""
        reference = device.timed_event()
        reference.record()
        reference.wait()
        return cls(reference)

    def step(self, begin: TimedEvent, end: TimedEvent) -> tuple[int, int]:
        """Return (start, end) of a step, in ns of the monotonic clock. The event `end` must have
        just completed.

        Steps must be passed in order. `end` must not be recorded again before the next call.
        """
        observed = time.monotonic_ns()
        duration = begin.milliseconds_until(end) * 1e6
        gap = self._reference.milliseconds_until(begin) * 1e6
        if gap > _MAX_GAP_NS:
            self._now = observed - _WAKE_NS - duration - gap
        ended = self._now + gap + duration
        ended += self._correction(observed - ended)
        self._reference, self._now = end, ended
        return round(ended - duration), round(ended)

    def _correction(self, lag: float) -> float:
        """Return the correction, in ns, to add to the clock. `lag` is the host's time minus the
        clock's time, in ns."""
        self._min_lag = min(self._min_lag, lag)
        self._num_seen += 1
        shift = 0.0
        if lag < 0:  # the host saw the event before the clock's time
            shift = lag
        elif self._num_seen == _WINDOW:
            shift = max(0.0, self._min_lag - _WAKE_NS)
        if shift or self._num_seen == _WINDOW:
            self._min_lag, self._num_seen = float("inf"), 0
        return shift
