"""Constrained rows of a step: what is kept of them by slot, and choices made from it."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.runner.ruled_rows import NO_ROWS, Long
from nanoactor.runner.sampling_table import SampledRows


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredRows:
    """The work of a step on constrained rows, behind its layers and in this order."""

    prompt_slots: Long
    """The slots in which the last of `Prefill.ends` leave what later choices need, ..."""
    continued_slots: Long
    """... and those of the rows behind the decode batch, which leave theirs."""
    choices: tuple[SampledRows, ...]
    """Rows that choose a token from what their slots have, a few at a time; `index` are slots."""

    @property
    def slots(self) -> Long:
        """Those that choose, in the order of the step's results."""
        return np.concatenate([NO_ROWS, *(part.slots for part in self.choices)])

    @property
    def size(self) -> int:
        """At most so many int32 numbers travel to the device."""
        words = 2 * (len(self.prompt_slots) + len(self.continued_slots)) + 8
        return words + sum(part.size for part in self.choices)
