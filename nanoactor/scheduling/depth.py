"""The number of steps that are planned ahead of the device."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

_WEIGHT = 0.2
"""Of the latest step in the mean."""
AHEAD_SECONDS = 0.002
"""Work that is queued on the device while the host turns a result into the next step. On one H200's
host that takes some 1 ms, and now and then twice as long."""


class _Planned(Protocol):
    @property
    def only_decodes(self) -> bool:
        """Tell whether it has decode rows, and nothing else."""


class PipelineDepth:
    """Two steps in flight hide the host where a step takes longer than the host does. Where steps
    are shorter, more are planned, as far as `AHEAD_SECONDS` and a limit go: who arrives meanwhile
    waits for them. Steps with prompts are long, and never followed by more than `least` allows.
    """

    def __init__(self, least: int, most: int) -> None:
        """`least` steps may always be in flight; no more than `most` ever are."""
        self._least, self._most = least, most
        self._seconds = math.inf

    def note(self, planned: _Planned, seconds: float) -> None:
        """Remember how long a step took that is done."""
        if not planned.only_decodes:
            return
        if self._seconds == math.inf:
            self._seconds = seconds
        self._seconds += _WEIGHT * (seconds - self._seconds)

    def has_room(self, in_flight: Collection[_Planned]) -> bool:
        """Tell whether one more may be planned behind these."""
        steps = len(in_flight)
        if steps < self._least or steps >= self._most:
            return steps < self._least
        short = steps * self._seconds < AHEAD_SECONDS
        return short and all(planned.only_decodes for planned in in_flight)
