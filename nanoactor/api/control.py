"""Methods of `AsyncLLM` that pause the engine and reset its prefix cache."""

from __future__ import annotations

import abc

from nanoactor.actors.frontend import FrontendActor
from nanoactor.errors import InvalidRequest, public


class ControlCalls(abc.ABC):
    """Base class of engines that can be paused. The methods have the same names as in vLLM's
    `AsyncLLM`."""

    @abc.abstractmethod
    def _require_frontend(self) -> FrontendActor:
        """Return the frontend actor, which runs in the caller's process and passes requests to the
        engine. Raises `EngineClosed`, `EngineDead` or `NotUsableHere` if the engine cannot be
        used."""

    @public
    async def pause_generation(self, *, mode: str = "keep") -> None:
        """Stop scheduling: all requests, including new ones, wait until `resume_generation`.

        Steps already in flight finish. Pausing a paused engine has no effect. Raises
        `InvalidRequest` unless `mode` is "keep". To end individual requests, use `abort`.
        """
        if mode != "keep":
            raise InvalidRequest(
                f'mode must be "keep", got {mode!r:.100}; a pause makes requests wait and '
                "never aborts them"
            )
        self._require_frontend().control.pause(True)

    @public
    async def resume_generation(self) -> None:
        """Resume scheduling after `pause_generation`."""
        self._require_frontend().control.pause(False)

    @public
    async def is_paused(self) -> bool:
        """Return True if the engine is paused."""
        return self._require_frontend().control.is_paused

    @public
    async def reset_prefix_cache(self) -> bool:
        """Invalidate the prefix cache: later requests reuse no KV blocks of earlier or running
        requests. Always returns True."""
        self._require_frontend().control.forget_index()
        return True
