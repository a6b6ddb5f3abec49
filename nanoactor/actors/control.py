"""Control commands from the user to the scheduler: pausing, and clearing the prefix cache index.
They are sent again after a restart."""

from __future__ import annotations

from typing import Any

from nanoactor.messages.orders import ForgetIndex, Pause


class EngineControl:
    """Sender of the user's control commands to the scheduler. While processes restart, commands
    are delayed."""

    def __init__(self) -> None:
        self.is_paused = False
        """True if planning is paused: no steps are planned, and requests wait where they are."""
        self._forget_number = 0
        """Number of commands so far to clear the prefix cache index."""
        self._scheduler: Any = None

    def pause(self, paused: bool) -> None:
        """Pause the planning of steps if `paused` is True; otherwise resume it."""
        self.is_paused = paused
        if self._scheduler is not None:
            self._scheduler.send(Pause(paused))

    def forget_index(self) -> None:
        """Clear the prefix cache index, so that later requests reuse no earlier results."""
        self._forget_number += 1
        if self._scheduler is not None:
            self._scheduler.send(ForgetIndex(self._forget_number))

    def detach(self) -> None:
        """Delay commands from now on, because processes are restarting."""
        self._scheduler = None

    def attach(self, scheduler: Any) -> None:
        """Send the commands that are still in force to a new scheduler, and later commands at once.
        Must be called before any request is sent to it."""
        self._scheduler = scheduler
        if self.is_paused:
            scheduler.send(Pause(True))
        if self._forget_number:  # it may have been under way when a process died
            scheduler.send(ForgetIndex(self._forget_number))
