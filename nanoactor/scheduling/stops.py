"""Which token ids may end a sequence: a look-up that sorts out the many that end none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Int32


class StopIds:
    """Counts, by token id, the living sequences that it would end."""

    def __init__(self) -> None:
        self._living = 0
        self._counts = np.zeros(64, np.int32)  # the last one stands for all larger ids: always 0

    def add(self, ids: Iterable[int]) -> None:
        """A sequence lives that these would end."""
        for token in ids:
            if token + 2 > len(self._counts):
                grown = np.zeros(1 << (token + 1).bit_length(), np.int32)
                grown[: len(self._counts)] = self._counts
                self._counts = grown
            self._living += 1
            self._counts[token] += 1

    def remove(self, ids: Iterable[int]) -> None:
        """It has ended."""
        for token in ids:
            self._living -= 1
            self._counts[token] -= 1

    def among(self, tokens: Int32) -> NDArray[np.bool_]:
        """For each token, whether it would end any living sequence."""
        if not self._living:
            return np.zeros(len(tokens), np.bool_)
        counts: NDArray[np.int32] = self._counts[np.minimum(tokens, len(self._counts) - 1)]
        return counts > 0
