"""Sets of numbers with cheap lookups: uids of requests seen so far, and token ids that may end a
sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32


class SeenNumbers:
    """A set of numbers that fills up from 0. Only the numbers above the first gap are stored
    individually."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def add(self, number: int) -> None:
        """Add a number to the set."""
        self._above.add(number)
        self._close_gap()

    def _close_gap(self) -> None:
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def fill(self, below: int, missing: Collection[int]) -> None:
        """Add all numbers from 0 to `below` - 1, except those in `missing`."""
        unseen = {number for number in missing if number not in self}
        floor = min(unseen, default=below)
        if floor > self._below:
            self._above = {number for number in self._above if number >= floor}
            self._below = floor
        self._above.update(n for n in range(self._below, below) if n not in unseen)
        self._close_gap()

    def __contains__(self, number: int) -> bool:
        """Return True if the number is in the set."""
        return number < self._below or number in self._above

    def __len__(self) -> int:
        """Return the number of entries above the first gap, which are stored individually."""
        return len(self._above)


class StopIds:
    """For each token id, the number of live sequences that the token may end. Sequences in which it
    may end only the free text count too."""

    def __init__(self) -> None:
        self._total = 0
        self._counts = np.zeros(64, np.int32)  # the last entry stands for all larger ids: always 0

    def add(self, ids: Iterable[int]) -> None:
        """Count the watched ids of a new sequence (`Sequence.watched_ids`)."""
        for token in ids:
            if token + 2 > len(self._counts):
                grown = np.zeros(1 << (token + 1).bit_length(), np.int32)
                grown[: len(self._counts)] = self._counts
                self._counts = grown
            self._total += 1
            self._counts[token] += 1

    def remove(self, ids: Iterable[int]) -> None:
        """Subtract the watched ids of a sequence that has ended."""
        for token in ids:
            self._total -= 1
            self._counts[token] -= 1

    def is_watched(self, tokens: Int32) -> NDArray[np.bool_]:
        """Return a bool array that is True for each of `tokens` (int32) that may end a live
        sequence or its free text."""
        if not self._total:
            return np.zeros(len(tokens), np.bool_)
        counts: NDArray[np.int32] = self._counts[np.minimum(tokens, len(self._counts) - 1)]
        return counts > 0
