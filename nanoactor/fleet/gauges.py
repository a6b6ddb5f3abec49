"""Statistics of a replica's engine, for its reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import NanoactorError

log = logging.getLogger("nanoactor.fleet")

LOOK_SECONDS = 1.0
_TELLING_TOKENS = 64
"""Minimum number of prompt tokens between two samples for an estimate of the prefill time."""
_WEIGHT = 0.3
"""Weight of a new measurement in the running mean."""
_FIGURES = (
    ("output_tokens", "scheduler", "output_tokens"),
    ("prefill_tokens", "scheduler", "prefill_tokens"),
    ("decode_tokens", "scheduler", "decode_tokens"),
    ("steps", "scheduler", "steps"),
    ("preemptions", "scheduler", "preemptions"),
    ("load_seconds", "scheduler", "load_seconds"),
    ("prompt_tokens", "blocks", "prompt_tokens"),
    ("hit_tokens", "blocks", "hit_tokens"),
    ("kv_blocks_available", "blocks", "available"),
    ("device_busy_seconds", "runner.0", "busy_seconds"),
)
"""Figures for /metrics: the name, the source actor, and the figure's name there."""
_PACE = ("device_busy_seconds", "steps", "prefill_tokens")
"""Figures from which the prefill time per token is estimated."""


class TokenPace:
    """Estimate of the prefill time per token, from the device's work between two samples."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Prefill seconds per token; 0 if not known yet."""
        self._step = 0.0
        """Seconds of a step without prompt tokens."""

    def note(self, busy: float, steps: float, prefilled: float) -> None:
        """Record the device's busy seconds, and the numbers of steps and of prefilled tokens,
        between two samples."""
        if steps <= 0:
            return
        if prefilled < _TELLING_TOKENS:
            if not prefilled:
                self._step = busy / steps
            return
        found = max(0.0, busy - steps * self._step) / prefilled
        self.seconds = found if not self.seconds else _mixed(self.seconds, found)


def _mixed(old: float, new: float) -> float:
    return (1 - _WEIGHT) * old + _WEIGHT * new


class Gauges:
    """Samples an engine's statistics once a second."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.pace = TokenPace()
        self.figures: Mapping[str, float] = {}
        self.looks = 0
        """Number of samples taken."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling."""
        self._task = asyncio.ensure_future(self._keep_looking())

    async def stop(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            with contextlib.suppress(NanoactorError):
                self.take(await self._llm.statistics())
            await asyncio.sleep(LOOK_SECONDS)

    def take(self, statistics: Mapping[str, Any]) -> None:
        """Record the figures of all actors. While an actor is being replaced, its last figures are
        kept."""
        found = dict(self.figures)
        for name, actor, key in _FIGURES:
            if actor in statistics:
                found[name] = float(statistics[actor]["actor"].get(key, 0))
        before, self.figures = self.figures, found
        self.looks += 1
        if before and set(_PACE) <= found.keys():
            self.pace.note(*(found[name] - before.get(name, 0.0) for name in _PACE))
