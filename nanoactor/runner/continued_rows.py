"""Chunks of one token that continue an output, and are computed as decode rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admissions, Int32, Step
from nanoactor.runner.ruled_rows import NO_ROWS, Long


class Continued(NamedTuple):
    """Chunks of one token each that continue outputs."""

    slots: Long
    starts: Long
    """The position of each."""
    token_ids: Int32
    resumed: int
    """So many, the first, choose a token at once."""
    constrained: Long
    """The slots of the last, which keep what their choice needs."""


class ContinuedSlots:
    """By slot on the runner's host: where outputs begin, and who chooses under masks."""

    def __init__(self, max_num_seqs: int) -> None:
        self._flags = np.zeros(max_num_seqs, np.bool_)
        self._outputs = np.zeros(max_num_seqs, np.int32)
        """Where the output begins."""
        self.has_constrained = False
        """Whether there has ever been one: else no step looks."""

    def admit(self, new: Admissions) -> None:
        """Take new sequences."""
        self._outputs[new.slots] = new.prompt_lengths
        if not self.has_constrained and not len(new.constrained):
            return
        self.has_constrained = True
        self._flags[new.slots] = False
        self._flags[new.slots[new.constrained]] = True

    def constrained_among(self, slots: Int32) -> Long:
        """Select the rows of these slots that are constrained."""
        return np.flatnonzero(self._flags[slots]) if self.has_constrained else NO_ROWS

    def split(self, step: Step) -> tuple[Step, Continued]:
        """Take the chunks of one token that end a step's list and continue an output out of it:
        they can attend as the decode batch does, and where an output was interrupted they give
        what the decode batch would have given. Pictures stand in prompts alone, so a step with
        some is left as it is; so are chunks that sample beside forks, whose results come last."""
        slots, token_ids = step.slots, step.token_ids
        continues = (step.counts == 1) & (step.starts >= self._outputs[slots])
        if step.vision or not continues.any():
            return step, Continued(NO_ROWS, NO_ROWS, token_ids[:0], 0, NO_ROWS)
        for scored in step.scored:
            continues[scored.rows] = False
        flags = self._flags[slots]
        kept = _last_run(continues & flags)
        silent = _last_run((continues & ~step.samples & ~flags)[:kept])
        rest = silent if step.forks else _last_run((continues & step.samples)[:silent])
        last = len(token_ids) - (len(slots) - rest)
        continued = Continued(
            slots[rest:].astype(np.int64),
            step.starts[rest:].astype(np.int64),
            token_ids[last:].copy(),
            silent - rest,
            slots[kept:].astype(np.int64),
        )
        step = dataclasses.replace(
            step,
            slots=slots[:rest],
            starts=step.starts[:rest],
            counts=step.counts[:rest],
            samples=step.samples[:rest],
            token_ids=token_ids[:last],
        )
        return step, continued


def _last_run(flags: NDArray[np.bool_]) -> int:
    """Return where the run of set flags begins that ends the array."""
    return len(flags) - int(np.argmin(np.append(flags[::-1], False)))
