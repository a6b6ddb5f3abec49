"""Statistics of a replica's engine, which the replica includes in its reports to the HTTP servers
in front of it (ingresses)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import NanoactorError

log = logging.getLogger("nanoactor.fleet")

SAMPLE_SECONDS = 1.0
_MIN_PREFILL_TOKENS = 64
"""Minimum number of prompt tokens that must be computed between two samples before these update the
estimated prefill time."""
_WEIGHT = 0.3
"""Weight of a new measurement in the moving average, from 0 to 1."""
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
"""Figures for `/metrics`: name, actor, and name of the actor's statistic."""
_PACE_FIGURES = ("device_busy_seconds", "steps", "prefill_tokens")
"""Figures from which the prefill time per token is estimated."""


class TokenPace:
    """Estimator of the prefill time per token, from the device's busy time between samples."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Prefill time per token in seconds; 0 until it has been measured."""
        self._decode_step_seconds = 0.0
        """Duration of a step without prompt tokens, in seconds."""

    def note(self, busy: float, steps: float, prefilled: float) -> None:
        """Update the estimate with the changes since the last sample: the device's busy time in
        seconds, the number of steps and the number of prefilled tokens."""
        if steps <= 0:
            return
        if prefilled < _MIN_PREFILL_TOKENS:
            if not prefilled:
                self._decode_step_seconds = busy / steps
            return
        measured = max(0.0, busy - steps * self._decode_step_seconds) / prefilled
        self.seconds = measured if not self.seconds else _moving_average(self.seconds, measured)


def _moving_average(old: float, new: float) -> float:
    return (1 - _WEIGHT) * old + _WEIGHT * new


class Gauges:
    """Sampler that reads the statistics of a replica's engine once a second."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.pace = TokenPace()
        self.figures: Mapping[str, float] = {}
        self.samples = 0
        """Number of samples taken so far."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling in the background."""
        self._task = asyncio.ensure_future(self._sample_loop())

    async def stop(self) -> None:
        """Stop sampling, and wait until the task has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sample_loop(self) -> None:
        while True:
            with contextlib.suppress(NanoactorError):
                self.record(await self._llm.statistics())
            await asyncio.sleep(SAMPLE_SECONDS)

    def record(self, statistics: Mapping[str, Any]) -> None:
        """Store a sample, as returned by `AsyncLLM.statistics`. If an actor (a component of the
        engine) is missing because its process is being replaced, its figures keep their last
        values."""
        figures = dict(self.figures)
        for name, actor, key in _FIGURES:
            if actor in statistics:
                figures[name] = float(statistics[actor]["actor"].get(key, 0))
        previous, self.figures = self.figures, figures
        self.samples += 1
        if previous and set(_PACE_FIGURES) <= figures.keys():
            self.pace.note(*(figures[name] - previous.get(name, 0.0) for name in _PACE_FIGURES))
