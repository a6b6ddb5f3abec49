"""Measurement of a device's busy and idle times, and timing of requests for the next step."""

from __future__ import annotations

# Time, in seconds, by which steps are requested earlier than measured, to absorb a slow wake-up.
_LEAD_MARGIN = 0.0005
_WEIGHT = 0.2
"""Weight of the newest value in a running average."""


class DeviceTime:
    """Total times, in ns, in which a device was busy and in which it was idle between steps."""

    def __init__(self) -> None:
        self.busy = self.idle = 0
        self.free_at = 0
        """End of the latest step, in ns of the monotonic clock; 0 before the first step."""

    def note(self, begin: int, end: int) -> None:
        """Record a step that ran from `begin` to `end`, in ns of the monotonic clock."""
        if self.free_at:
            self.idle += begin - self.free_at
        self.free_at = end
        self.busy += end - begin


class StepRequests:
    """Decides when to request steps from a scheduler that plans each step as late as possible. Each
    step is requested once, early enough to be prepared when the previous step ends. All times are
    in seconds."""

    def __init__(self) -> None:
        self._lead = 0.001
        """Running average of the time from the request for a step until it is prepared."""
        self._step_seconds = 0.0
        """Running average of the duration of a step."""
        self.reset()

    def reset(self) -> None:
        """Forget the latest request, but keep the averages."""
        self._requested_step, self._requested_at = 0, 0.0

    @property
    def delay(self) -> float:
        """Time from the start of a step to the request for the next one, in seconds; may be
        negative."""
        return self._step_seconds - self._lead - _LEAD_MARGIN

    def request(self, step: int, received: int, now: float) -> bool:
        """Record a request for step `step` and return True, unless the step was already requested
        or received. `received` is the number of the latest received step."""
        if step <= max(received, self._requested_step):
            return False
        self._requested_step, self._requested_at = step, now
        return True

    def note_prepared(self, step: int, now: float) -> None:
        """Record that step `step` was prepared at time `now`."""
        if step == self._requested_step:
            self._lead += _WEIGHT * (now - self._requested_at - self._lead)

    def note_done(self, seconds: float) -> None:
        """Record that a step took `seconds` seconds."""
        self._step_seconds += _WEIGHT * (seconds - self._step_seconds)
