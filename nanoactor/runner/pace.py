"""When a device's steps begin and end, and when the next one is to be asked for."""

from __future__ import annotations

# How much earlier than measured the next step is asked for, to absorb a slow wake-up.
_LEAD_MARGIN = 0.0005
_WEIGHT = 0.2
"""Of the newest value in a running average."""


class DeviceTime:
    """How long a device was busy, and idle between steps; in ns."""

    def __init__(self) -> None:
        self.busy = self.idle = 0
        self.free_at = 0
        """When the latest step ended, in ns of the monotonic clock; 0 before there is one."""

    def note(self, begin: int, end: int) -> None:
        """A step ran from `begin` to `end`, in ns of the monotonic clock."""
        if self.free_at:
            self.idle += begin - self.free_at
        self.free_at = end
        self.busy += end - begin


class StepRequests:
    """Where the scheduler waits to be asked for steps: each is asked for once, so that it is
    prepared shortly before the one before it ends. All times are in seconds."""

    def __init__(self) -> None:
        self._lead = 0.001
        """From asking for a step to having it prepared: a running average."""
        self._step_seconds = 0.0
        """What a step takes, likewise."""
        self.forget()

    def forget(self) -> None:
        """Begin with no step asked for."""
        self._asked_for, self._asked_at = 0, 0.0

    @property
    def wait(self) -> float:
        """Return how long after the begin of a step the next one is to be asked for."""
        return self._step_seconds - self._lead - _LEAD_MARGIN

    def ask(self, step: int, received: int, now: float) -> bool:
        """Return whether a step is to be asked for now; `received` is the last one that came."""
        if step <= max(received, self._asked_for):
            return False
        self._asked_for, self._asked_at = step, now
        return True

    def note_prepared(self, step: int, now: float) -> None:
        """A step is prepared."""
        if step == self._asked_for:
            self._lead += _WEIGHT * (now - self._asked_at - self._lead)

    def note_done(self, seconds: float) -> None:
        """A step took so long."""
        self._step_seconds += _WEIGHT * (seconds - self._step_seconds)
