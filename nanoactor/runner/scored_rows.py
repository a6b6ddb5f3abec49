"""The rows of a step whose log-probabilities are wanted, and what the device says of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Int32, Step
from nanoactor.runner.row_order import RowOrder
from nanoactor.runner.ruled_rows import NO_ROWS, Long
from nanoactor.scores import ScoreRequests, StepScores, TokenScores

_NOT_ASKED = -1


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of one step: of prompts first, then those that sample."""

    prompt_rows: Long
    """Which tokens of the step's prompts ..."""
    targets: Long
    """... are followed by which."""
    rows: Long
    """Which of the step's results: what is scored is what was chosen, ..."""
    places: Long
    """... and where their rows stand."""
    counts: Int32
    """How many of the likeliest tokens are told beside each of all these."""

    @property
    def most(self) -> int:
        """The largest of `counts`."""
        return int(self.counts.max(initial=0))

    @property
    def size(self) -> int:
        """At most so many int32 numbers travel to the device."""
        return 2 * (len(self.prompt_rows) + len(self.targets) + len(self.rows)) + 12

    def message(self, table: Int32) -> StepScores:
        """Read what `nanoactor.models.token_scores.TokenScorer` has said of each row."""
        most = (table.shape[1] - 2) // 2
        counts = np.minimum(self.counts, np.int32(most))
        told = np.arange(most) < counts[:, None]
        return StepScores(
            self.rows.astype(np.int32),
            TokenScores(
                logprobs=table[:, 0].copy().view(np.float32),
                ranks=table[:, 1].copy(),
                counts=counts,
                top_ids=table[:, 2 : 2 + most][told],
                top_logprobs=table[:, 2 + most :][told].view(np.float32),
            ),
        )


class ScoreTable:
    """By slot on the runner's host: of whom log-probabilities are wanted."""

    def __init__(self, max_num_seqs: int) -> None:
        self._output = np.full(max_num_seqs, _NOT_ASKED, np.int32)
        """How many of the likeliest tokens are told; -1: nothing is."""
        self._prompt = np.full(max_num_seqs, _NOT_ASKED, np.int32)
        self._asked = False
        """Whether anybody has ever asked: else no step looks."""

    def admit(self, slots: Int32, wanted: ScoreRequests | None) -> None:
        """Take what new sequences want."""
        if not self._asked and wanted is None:
            return
        self._output[slots] = self._prompt[slots] = _NOT_ASKED
        if wanted is not None:
            self._asked = True
            self._output[slots[wanted.rows]] = wanted.output
            self._prompt[slots[wanted.rows]] = wanted.prompt

    def asking(self, slots: Long) -> Long:
        """Select the rows of these slots that want their output's."""
        if not self._asked:
            return NO_ROWS
        return np.flatnonzero(self._output[slots] >= 0)

    def rows(self, step: Step, slots: Long, asking: Long, order: RowOrder) -> ScoredRows | None:
        """Return what a step scores, of whose results, of `slots`, these are `asking`; None where
        that is nothing."""
        if not len(asking) and not step.scored:
            return None
        counts = [self._output[slots[asking]]]
        prompt_rows, targets = NO_ROWS, NO_ROWS
        for chunks in step.scored:
            firsts = (np.cumsum(step.counts) - step.counts)[chunks.rows]
            begins = firsts + chunks.starts - step.starts[chunks.rows]
            prompt_rows = _runs(begins, chunks.counts)
            targets = chunks.targets.astype(np.int64)
            wanted = self._prompt[step.slots[chunks.rows]]
            counts = [np.repeat(wanted, chunks.counts), *counts]
        every = np.concatenate(counts)
        return ScoredRows(prompt_rows, targets, asking, order.places(asking), every)


def _runs(begins: NDArray[np.integer], counts: Int32) -> Long:
    """Count up from each of these, so many times."""
    ends = np.cumsum(counts)
    return (np.repeat(begins - (ends - counts), counts) + np.arange(counts.sum())).astype(np.int64)
