"""Layout of a step's rows: as chunks of several tokens, as rows of one token, or as choices, which
compute no token and only sample from a hidden state that an earlier step has kept.

A row that computes a single output token can be computed like a decode row. When a sequence resumes
after a restart, such rows reproduce the results of the original decode rows. If the device allows
several rows of one sequence, the tokens of a run, which a grammar has forced, can also be laid out
as such rows. The step then remains a decode step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32
from nanoactor.messages.rows import KEEP, POOL, SAMPLE, SCORE, Rows, StepRows
from nanoactor.runner.batch.inputs import NO_INDICES, Long

# Maximum number of tokens of a run that is split into rows. Each row reads the whole context,
# whereas a chunk reads it only once.
MAX_RUN_LENGTH = 16


class Continued(NamedTuple):
    """Rows of one token that follow the decode batch (the rows that are repeated from step to
    step): first those that sample, then those whose hidden state is not read, then those whose
    state is kept for a later step."""

    slots: Long
    positions: Long
    token_ids: Int32
    resumed: Long
    """Rows that sample, as indices into `StepRows.others`."""
    kept: Long
    """Slots (indices in the batch) of the rows whose hidden state is kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step outside the decode batch, grouped by how they are computed.

    Rows are specified as indices into `StepRows.others`.
    """

    rows: StepRows
    chunks: Long
    """Rows that are computed as chunks of several tokens."""
    choices: Long
    firsts: Long
    """Index, in the step's token ids, of each row's first token."""
    lengths: Long
    """Length of each row's sequence once the row is computed. For a copy (a row that samples from
    the hidden state of another row, its source), the length of the source."""
    sampled: Long
    """Chunks and copies after which a token is sampled."""
    kept: Long
    """Chunks and copies whose last hidden state is kept."""
    pooled: Long
    """Chunks that are pooled."""
    ends: Long
    """For each row in `sampled`, `kept` and `pooled`, the chunk whose hidden state it reads."""
    continued: Continued

    @property
    def resized(self) -> Long:
        """Rows that change the computed length of their slot's sequence."""
        others = self.rows.others
        return ((others.counts > 0) | others.copies).nonzero()[0] if len(others) else NO_INDICES

    @classmethod
    def of(
        cls, rows: StepRows, token_ids: Int32, outputs: Int32, max_rows: int, runs_from: int
    ) -> StepLayout:
        """Choose how each row of a step is computed.

        `outputs` are the positions at which outputs begin, by slot (a sequence's index in the
        batch). `max_rows` is the maximum number of rows that are computed like decode rows; 0
        disables this. Several rows of one sequence are used only if the step then has at least
        `runs_from` rows that are computed like decode rows.
        """
        others = rows.others
        if not len(others):
            return cls(rows, *(NO_INDICES,) * 8, NO_CONTINUED)
        as_rows = _singles(others, len(rows.decode_slots), outputs, max_rows, runs_from)
        chunks = ((others.counts > 0) & ~as_rows).nonzero()[0]
        lengths = (others.starts + others.counts).astype(np.int64)
        computed = read = chunks
        if len(others.sources):
            copies = others.copies.nonzero()[0]
            sources = _sources(others, copies, chunks)
            lengths[copies] = lengths[sources]
            computed, read = np.concatenate((chunks, copies)), np.concatenate((chunks, sources))
        ids = others.ids
        firsts = (ids.cumsum() - ids).astype(np.int64)
        wants = others.wants[computed]
        samples, keeps, pools = wants & SAMPLE > 0, wants & KEEP > 0, wants & POOL > 0
        return cls(
            rows,
            chunks,
            choices=others.choices.nonzero()[0],
            firsts=firsts,
            lengths=lengths,
            sampled=computed[samples],
            kept=computed[keeps],
            pooled=computed[pools],
            ends=np.concatenate((read[samples], read[keeps], read[pools])),
            continued=_continued(others, as_rows.nonzero()[0], token_ids, firsts),
        )

    @property
    def samplers(self) -> tuple[Long, Long, Long]:
        """(slots, positions of the sampled tokens, row indices in the step) of all rows that choose
        a token, in the order of `Update.positions`."""
        decode, starts, others = self.rows
        if not len(others):
            return decode, starts + 1, np.arange(len(decode))
        late = np.concatenate((self.continued.resumed, self.choices))
        slots, first = others.slots.astype(np.int64), len(decode)
        return (
            np.concatenate((slots[self.sampled], decode, slots[late])),
            np.concatenate((self.lengths[self.sampled], starts + 1, self.lengths[late])),
            np.concatenate((self.sampled + first, np.arange(first), late + first)),
        )


def _sources(others: Rows, copies: Long, chunks: Long) -> Long:
    """Return, for each copy, the chunk whose hidden state it reads."""
    by_slot = dict(zip(others.slots[chunks].tolist(), chunks.tolist(), strict=True))
    return np.array([by_slot[slot] for slot in others.sources[copies].tolist()], np.int64)


def _singles(
    others: Rows, decodes: int, outputs: Int32, max_rows: int, runs_from: int
) -> NDArray[np.bool_]:
    counts, wants = others.counts, others.wants
    continues = others.starts >= outputs[others.slots]
    if not max_rows or not continues.any():  # the case for most prompts
        return np.zeros(len(others), np.bool_)
    continues &= (counts > 0) & (wants & SCORE == 0)
    single: NDArray[np.bool_] = continues & (counts == 1)
    runs = continues & (wants & KEEP > 0) & (counts > 1) & (counts <= MAX_RUN_LENGTH)
    if runs.any():
        first = decodes + int(single.sum())
        ends = first + np.cumsum(counts * runs)
        runs &= ends <= max_rows
        if first + int(counts[runs].sum()) >= runs_from:
            single |= runs
    return single


NO_CONTINUED = Continued(NO_INDICES, NO_INDICES, np.empty(0, np.int32), NO_INDICES, NO_INDICES)


def _continued(others: Rows, index: Long, token_ids: Int32, firsts: Long) -> Continued:
    """Lay out the rows at `index` as rows of one token each. `firsts` are the indices, in
    `token_ids`, of the first token of each row in `others`."""
    if not len(index):
        return NO_CONTINUED
    sampling: list[tuple[int, int, int]] = []
    unread: list[tuple[int, int, int]] = []
    kept: list[tuple[int, int, int]] = []
    resumed: list[int] = []
    rows = others.take(index)
    columns = (index, rows.slots, rows.starts, rows.counts, rows.wants, firsts[index])
    for row, slot, start, count, wants, first_token in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        tokens_of_row = [(slot, start + offset, first_token + offset) for offset in range(count)]
        unread += tokens_of_row[:-1]
        if wants & SAMPLE:
            sampling.append(tokens_of_row[-1])
            resumed.append(row)
        else:
            (kept if wants & KEEP else unread).append(tokens_of_row[-1])
    slots, positions, tokens = np.array(sampling + unread + kept, np.int64).T.copy()
    last = slots[len(slots) - len(kept) :]
    return Continued(slots, positions, token_ids[tokens], np.array(resumed, np.int64), last)
