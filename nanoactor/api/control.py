"""The part of `AsyncLLM` that pauses the engine and resets its cache."""

from __future__ import annotations

import abc

from nanoactor.actors.frontend import FrontendActor
from nanoactor.errors import InvalidRequest, public


class Controlled(abc.ABC):
    """An engine that can be paused, as vLLM's `AsyncLLM` can."""

    @abc.abstractmethod
    def _running(self) -> FrontendActor:
        """Return the frontend. Raises if the engine is not running or cannot be used from here."""

    @public
    async def pause_generation(self, *, mode: str = "keep") -> None:
        """Stop planning steps: all requests, including new ones, wait until `resume_generation`.
        Steps in flight finish. A second call has no effect.

        Raises `InvalidRequest` for any other `mode`; use `abort` to end individual requests.
        """
        if mode != "keep":
            raise InvalidRequest(
                f'mode must be "keep", which makes requests wait, got {mode!r:.100}'
            )
        self._running().control.pause(True)

    @public
    async def resume_generation(self) -> None:
        """Resume planning steps."""
        self._running().control.pause(False)

    @public
    async def is_paused(self) -> bool:
        """Return True if the engine is paused."""
        return self._running().control.is_paused

    @public
    async def reset_prefix_cache(self) -> bool:
        """Invalidate the prefix cache: later requests reuse nothing that was computed before this
        call or by requests that are running now. Returns True."""
        self._running().control.forget_index()
        return True
