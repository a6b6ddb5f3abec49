"""Sets of points in time, as intervals: how long they are, and how long two of them overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Cover:
    """The union of intervals."""

    def __init__(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        order = np.argsort(begins, kind="stable")
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        # An interval opens a new stretch where it begins after all before it have ended.
        opens = np.ones(len(begins), np.bool_)
        opens[1:] = begins[1:] > reached[:-1]
        closes = np.append(opens[1:], True)[: len(begins)]
        self.begins, self.ends = begins[opens], reached[closes]
        lengths = self.ends - self.begins
        self._knots = np.stack((self.begins, self.ends), 1).ravel()
        before = np.cumsum(lengths) - lengths
        self._measure = np.stack((before, before + lengths), 1).ravel()

    @property
    def length(self) -> int:
        """Of all of it."""
        return int(self._measure[-1]) if len(self._measure) else 0

    def until(self, times: Any) -> NDArray[np.float64]:
        """How much of it lies before each of these times."""
        if not len(self._knots):
            return np.zeros(np.shape(times))
        values: NDArray[np.float64] = np.interp(times, self._knots, self._measure)
        return values

    def overlap(self, other: Cover) -> float:
        """How long both are."""
        return float((self.until(other.ends) - self.until(other.begins)).sum())

    def within(self, begin: int, end: int) -> Cover:
        """The part between two times."""
        begins, ends = self.begins.clip(begin, end), self.ends.clip(begin, end)
        kept = ends > begins
        return Cover(begins[kept], ends[kept])
