"""The number of log-probabilities that each sequence requests, stored on the runner's host."""

from __future__ import annotations

import numpy as np

from nanoactor.messages.engine import Int32
from nanoactor.messages.rows import SCORE, concatenate_ranges
from nanoactor.messages.scores import ScoreRequests
from nanoactor.runner.batch.inputs import NO_INDICES, Long
from nanoactor.runner.batch.row_layout import StepLayout

_NOT_REQUESTED = -1
_NO_COUNTS: Int32 = np.empty(0, np.int32)


class ScoreTable:
    """Stores, for each slot (a sequence's index in the batch), how many top tokens to report with
    each output token and with each prompt token; -1 if no log-probabilities are requested."""

    def __init__(self, max_num_seqs: int) -> None:
        self.output = np.full(max_num_seqs, _NOT_REQUESTED, np.int32)
        self._prompt = np.full(max_num_seqs, _NOT_REQUESTED, np.int32)
        self._last_position = np.zeros(max_num_seqs, np.int32)
        """Position of the prompt's last token, by slot."""
        self._any_requested = False
        """True once any request has asked for log-probabilities; until then, steps skip all
        lookups."""

    def admit(self, slots: Int32, prompt_lengths: Int32, requests: ScoreRequests | None) -> None:
        """Record which log-probabilities newly admitted sequences request. `requests.rows` are
        indices into `slots`. `requests` is None if no sequence requests any."""
        if requests is None and not self._any_requested:
            return
        self.output[slots] = self._prompt[slots] = _NOT_REQUESTED
        self._last_position[slots] = prompt_lengths - 1
        if requests is not None:
            self._any_requested = True
            self.output[slots[requests.rows]] = requests.output
            self._prompt[slots[requests.rows]] = requests.prompt

    def requesting(self, slots: Long) -> Long:
        """Return the indices, in `slots`, of the sequences that request log-probabilities of their
        output tokens."""
        return np.flatnonzero(self.output[slots] >= 0) if self._any_requested else NO_INDICES

    def prompts(self, token_ids: Int32, layout: StepLayout) -> tuple[Long, Long, Int32]:
        """Return the prompt tokens whose next tokens are scored, as three arrays: the indices of
        these tokens in the step's chunks, the ids of the next tokens, and the numbers of top tokens
        requested."""
        if not self._any_requested or not len(layout.chunks):
            return NO_INDICES, NO_INDICES, _NO_COUNTS
        rows = layout.rows.others.take(layout.chunks)
        scored = np.flatnonzero(rows.wants & SCORE)
        firsts = (np.cumsum(rows.counts) - rows.counts)[scored]
        slots, ids = rows.slots[scored], layout.firsts[layout.chunks[scored]]
        counts = np.minimum(rows.counts[scored], self._last_position[slots] - rows.starts[scored])
        targets = token_ids[concatenate_ranges(ids + 1, counts)].astype(np.int64)
        return concatenate_ranges(firsts, counts), targets, np.repeat(self._prompt[slots], counts)
