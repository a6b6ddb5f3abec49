"""The part of `AsyncLLM` that pauses the engine and resets its cache."""

from __future__ import annotations

import abc

from nanoactor.actors.frontend import FrontendActor
from nanoactor.errors import InvalidRequest, public


class ControlCalls(abc.ABC):
    """An engine that can be paused, as vLLM's `AsyncLLM` can."""

    @abc.abstractmethod
    def _require_frontend(self) -> FrontendActor:
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
        self._require_frontend().control.pause(True)

    @public
    async def resume_generation(self) -> None:
        """Resume planning steps, after `pause_generation`."""
        self._require_frontend().control.pause(False)

    @public
    async def is_paused(self) -> bool:
        """Return True if the engine is paused."""
        return self._require_frontend().control.is_paused

    @public
    async def reset_prefix_cache(self) -> bool:
        """Invalidate the prefix cache: later requests reuse nothing that was computed before this
        call or by requests that are running now. Returns True."""
        self._require_frontend().control.forget_index()
        return True
