"""Chunks that continue an output, and are computed as decode rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admissions, Int32, Step
from nanoactor.runner.ruled_rows import NO_ROWS, Long

# Each row reads the whole context, which a chunk reads once: longer runs stay chunks.
LONGEST_RUN = 16


class Continued(NamedTuple):
    """Rows that compute a position of an output each."""

    slots: Long
    positions: Long
    token_ids: Int32
    resumed: int
    """So many, the first, choose a token at once."""
    constrained: Long
    """The slots of the last, which keep what their choice needs."""


# Chunks that may be rows, in the planner's order; 0 is one that may not.
_RUN, _CHOOSING, _SILENT, _CONSTRAINED = range(1, 5)
_NOBODY = Continued(NO_ROWS, NO_ROWS, np.empty(0, np.int32), 0, NO_ROWS)


class ContinuedSlots:
    """By slot on the runner's host: where outputs begin, and who chooses under masks."""

    def __init__(self, max_num_seqs: int, runs_as_rows_from: int) -> None:
        """Steps of so many decode rows may have several of one sequence."""
        self._max_num_seqs, self._runs_from = max_num_seqs, runs_as_rows_from
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

    def split(self, step: Step, decodes: int) -> tuple[Step, Continued]:
        """Take chunks that continue an output out of the end of a step's list, which has so many
        rows that decode.

        Single tokens can attend as the decode batch does, and where an output was interrupted they
        give what the decode batch would have given. So can the tokens of a run, where the device
        lets them: the step stays one that decodes. Pictures stand in prompts alone, so a step with
        some is left as it is; so are chunks that sample beside forks, whose results come last.
        """
        continues = step.starts >= self._outputs[step.slots]
        if step.vision or not continues.any():
            return step, _NOBODY
        for scored in step.scored:
            continues[scored.rows] = False
        rest = self._first(step, continues, decodes)
        if rest == len(continues):
            return step, _NOBODY
        tokens = int(step.counts[:rest].sum())
        kept = dataclasses.replace(
            step,
            slots=step.slots[:rest],
            starts=step.starts[:rest],
            counts=step.counts[:rest],
            samples=step.samples[:rest],
            token_ids=step.token_ids[:tokens],
        )
        return kept, self._rows(step, rest, step.token_ids[tokens:])

    def _first(self, step: Step, continues: NDArray[np.bool_], decodes: int) -> int:
        """Return the first chunk of those at the end that are rows. The planner has runs first,
        then single tokens: those that choose at once, those that do not, constrained ones."""
        constrained, counts = self._flags[step.slots], step.counts
        single = np.where(constrained, _CONSTRAINED, _SILENT - step.samples)
        run = constrained & (counts <= LONGEST_RUN)
        kinds = (continues * np.where(counts == 1, single, run)).tolist()
        first = len(kinds)
        for kind in (_CONSTRAINED, _SILENT) if step.forks else (_CONSTRAINED, _SILENT, _CHOOSING):
            while first and kinds[first - 1] == kind:
                first -= 1
        rows, last = decodes + len(kinds) - first, first
        while first and kinds[first - 1] == _RUN and rows + counts[first - 1] <= self._max_num_seqs:
            first -= 1
            rows += int(counts[first])
        return first if rows >= self._runs_from else last

    def _rows(self, step: Step, first: int, token_ids: Int32) -> Continued:
        """Lay out all tokens of the chunks from `first` on as rows: those that choose, those of
        which nothing is kept, then the last of each constrained sequence."""
        choosing: list[tuple[int, int, int]] = []
        silent: list[tuple[int, int, int]] = []
        kept: list[tuple[int, int, int]] = []
        token = 0
        columns = (step.slots, step.starts, step.counts, step.samples, self._flags[step.slots])
        for chunk in zip(*(column[first:].tolist() for column in columns), strict=True):
            slot, start, count, samples, constrained = chunk
            rows = [(slot, start + offset, token + offset) for offset in range(count)]
            silent += rows[:-1]
            (kept if constrained else choosing if samples else silent).append(rows[-1])
            token += count
        slots, positions, order = np.array(choosing + silent + kept, np.int64).T.copy()
        last = slots[len(slots) - len(kept) :]
        return Continued(slots, positions, token_ids[order], len(choosing), last)
