"""The order of a step's results, and that of the rows behind its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanoactor.runner.ruled_rows import Long


class RowOrder(NamedTuple):
    """Results come from chunks before they come from the decode batch: of prompts that end, of
    outputs that are resumed, of the decode batch, of constrained rows. Resumed rows attend as the
    decode batch does, and stand behind it."""

    prompts: int
    resumed: int
    decodes: int

    def places(self, results: Long) -> Long:
        """Return where the rows of these results stand."""
        behind = results - self.prompts
        moved = np.where(
            behind < self.resumed,
            results + self.decodes,
            np.where(behind < self.resumed + self.decodes, results - self.resumed, results),
        )
        return np.where(behind < 0, results, moved)
