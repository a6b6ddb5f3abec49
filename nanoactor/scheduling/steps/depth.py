"""Control of how many steps are planned ahead of the device."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

_WEIGHT = 0.2
"""Weight of the latest step in the running mean of step times."""
AHEAD_SECONDS = 0.002
"""Seconds of work to keep queued on the device while the host processes a result and plans the next
step. On the host of an H200, this takes about 1 ms, and occasionally 2 ms."""
STEPWISE_SECONDS = 0.0025
"""Value used instead of `AHEAD_SECONDS` while the tokens of some sequence are masked or chosen by
its caller. The host then takes about 2 ms per step."""


class _Planned(Protocol):
    @property
    def is_decode_step(self) -> bool:
        """True if the step has decode rows, computes no prompts, and encodes no images."""


class PipelineDepth:
    """Decides how many steps may be in flight.

    Two steps hide the host's work if a step takes longer than that work. If steps are shorter,
    enough are planned to cover the host's time. Their number is limited, because a new request
    waits for all steps in flight.

    More than `min_depth` steps are in flight only if all of them are decode steps, without prompts.
    Steps with prompts are long. A sequence whose tokens are masked or chosen by its caller has only
    one step in flight in any case.
    """

    def __init__(self, min_depth: int, max_depth: int) -> None:
        """Up to `min_depth` steps may always be in flight, and at most `max_depth` if steps are
        short."""
        self._min_depth, self._max_depth = min_depth, max_depth
        self._seconds = math.inf
        self.is_paused = False
        """True if planning is paused."""

    def pause(self, paused: bool) -> None:
        """Pause the planning of steps if `paused` is True; otherwise resume it."""
        self.is_paused = paused

    def note_step(self, planned: _Planned, seconds: float) -> None:
        """Record the duration of a finished step in seconds; steps other than decode steps are
        ignored."""
        if not planned.is_decode_step:
            return
        if self._seconds == math.inf:
            self._seconds = seconds
        self._seconds += _WEIGHT * (seconds - self._seconds)

    def has_room(self, in_flight: Collection[_Planned], *, stepwise: bool) -> bool:
        """Return True if another step may be planned after those in flight. `stepwise` is True if
        the tokens of some running sequence are masked or chosen by its caller, so that the host
        takes longer per step."""
        if self.is_paused:
            return False
        steps = len(in_flight)
        if steps < self._min_depth or steps >= self._max_depth:
            return steps < self._min_depth
        if stepwise:
            needs_work = (steps - 1) * self._seconds < STEPWISE_SECONDS
        else:
            needs_work = steps * self._seconds < AHEAD_SECONDS
        return needs_work and all(planned.is_decode_step for planned in in_flight)
