"""Counts of the positions whose keys and values are known to be computed, by slot."""

from __future__ import annotations

from collections import deque

import numpy as np

from nanoactor.messages.engine import Int32
from nanoactor.messages.rows import Long


class ComputedPositions:
    """Number of positions of each slot that are computed by steps known to be done. The prefix
    index uses it after a restart, when only these positions can be used again."""

    def __init__(self, slots: int) -> None:
        self._computed = np.zeros(slots, np.int64)
        self._in_flight: deque[tuple[int, Long, Long]] = deque()
        """(step, slots, end position of each slot) of each step that is not known to be done."""

    def of(self, slot: int) -> int:
        """Return the number of positions of a slot that are known to be computed."""
        return int(self._computed[slot])

    def begin(self, slot: int) -> None:
        """Count from 0 again for a new sequence in a slot."""
        self._computed[slot] = 0

    def plan(self, step: int, slots: Long, ends: Long) -> None:
        """Record that a planned step computes each slot's positions up to its end position."""
        self._in_flight.append((step, slots, ends))

    def discard(self, slots: Int32, starts: Long) -> None:
        """Treat positions of these slots from `starts` on as not computed, because the steps in
        flight compute them from tokens that differ from the known ones."""
        limits = np.full(len(self._computed), np.iinfo(np.int64).max)
        limits[slots] = starts
        np.minimum(self._computed, limits, out=self._computed)
        for _, computed, ends in self._in_flight:
            np.minimum(ends, limits[computed], out=ends)

    def complete(self, step: int) -> None:
        """Record that all steps up to `step` are done."""
        while self._in_flight and self._in_flight[0][0] <= step:
            _, slots, ends = self._in_flight.popleft()
            self._computed[slots] = ends

    def clear(self) -> None:
        """Forget all positions and steps."""
        self._in_flight.clear()
        self._computed[:] = 0
