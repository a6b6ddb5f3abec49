"""Orders to the scheduler: pause planning, clear the prefix index. Sent again after a restart."""

from __future__ import annotations

from typing import Any

from nanoactor.messages.orders import ForgetIndex, Pause


class EngineControl:
    """Sends orders to the scheduler at once, or once all processes have restarted."""

    def __init__(self) -> None:
        self.is_paused = False
        """True if no steps are planned, so that requests wait where they are."""
        self._forget_number = 0
        """Number of orders so far to forget the prefix index."""
        self._scheduler: Any = None

    def pause(self, paused: bool) -> None:
        """Pause or resume the planning of steps."""
        self.is_paused = paused
        if self._scheduler is not None:
            self._scheduler.send(Pause(paused))

    def forget_index(self) -> None:
        """Invalidate the prefix cache for later requests."""
        self._forget_number += 1
        if self._scheduler is not None:
            self._scheduler.send(ForgetIndex(self._forget_number))

    def detach(self) -> None:
        """Hold back orders until all processes have restarted."""
        self._scheduler = None

    def attach(self, scheduler: Any) -> None:
        """Send the orders that still apply to a restarted scheduler, before any request."""
        self._scheduler = scheduler
        if self.is_paused:
            scheduler.send(Pause(True))
        if self._forget_number:  # it may have been under way when a process died
            scheduler.send(ForgetIndex(self._forget_number))
