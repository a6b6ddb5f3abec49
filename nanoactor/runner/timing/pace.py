"""Timing of steps: how long a device is busy, and when to request the next step."""

from __future__ import annotations

# Seconds by which the next step is requested earlier than measured, to absorb a slow wake-up.
_LEAD_MARGIN = 0.0005
_WEIGHT = 0.2
"""Weight of the newest value in a running average."""


class DeviceTime:
    """The time in ns that a device was busy, and that it was idle between steps."""

    def __init__(self) -> None:
        self.busy = self.idle = 0
        self.free_at = 0
        """End of the latest step in ns of the monotonic clock; 0 before the first step."""

    def note(self, begin: int, end: int) -> None:
        """Record a step that ran from `begin` to `end`, in ns of the monotonic clock."""
        if self.free_at:
            self.idle += begin - self.free_at
        self.free_at = end
        self.busy += end - begin


class StepRequests:
    """Decides when to request steps from a scheduler that plans late: each step once, and early
    enough to be prepared when the step before it ends. All times are in seconds."""

    def __init__(self) -> None:
        self._lead = 0.001
        """Running average of the time from the request for a step until the step is prepared."""
        self._step_seconds = 0.0
        """Running average of the duration of a step."""
        self.reset()

    def reset(self) -> None:
        """Forget the latest request; keep the averages."""
        self._requested_step, self._requested_at = 0, 0.0

    @property
    def delay(self) -> float:
        """Return the time from the start of a step to the request for the next one."""
        return self._step_seconds - self._lead - _LEAD_MARGIN

    def request(self, step: int, received: int, now: float) -> bool:
        """Return True if `step` was neither requested nor received yet, and record the request.
        `received` is the number of the latest step received."""
        if step <= max(received, self._requested_step):
            return False
        self._requested_step, self._requested_at = step, now
        return True

    def note_prepared(self, step: int, now: float) -> None:
        """Record that a step was prepared at time `now`."""
        if step == self._requested_step:
            self._lead += _WEIGHT * (now - self._requested_at - self._lead)

    def note_done(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._step_seconds += _WEIGHT * (seconds - self._step_seconds)
