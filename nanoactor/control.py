"""The part of `AsyncLLM` by which its owner holds it up and empties its cache."""

from __future__ import annotations

import abc

from nanoactor.actors.frontend import FrontendActor
from nanoactor.errors import InvalidRequest, public


class Controlled(abc.ABC):
    """An engine whose steps can be stopped, as vLLM's `AsyncLLM` has it."""

    @abc.abstractmethod
    def _running(self) -> FrontendActor:
        """Return the frontend; raise where the engine cannot serve from here."""

    @public
    async def pause_generation(self, *, mode: str = "keep") -> None:
        """Plan no more steps: requests wait where they are, new ones too, until
        `resume_generation`. Steps under way end. A second call changes nothing.

        Raises `InvalidRequest` for another `mode`: `abort` ends requests one by one.
        """
        if mode != "keep":
            raise InvalidRequest(f'mode must be "keep": requests wait, got {mode!r:.100}')
        self._running().control.pause(True)

    @public
    async def resume_generation(self) -> None:
        """Resume planning steps."""
        self._running().control.pause(False)

    @public
    async def is_paused(self) -> bool:
        """Return True if no steps are planned."""
        return self._running().control.is_paused

    @public
    async def reset_prefix_cache(self) -> bool:
        """Invalidate the prefix cache: later requests find nothing that was computed before this
        call or by requests that are running now. Returns True."""
        self._running().control.forget_index()
        return True
