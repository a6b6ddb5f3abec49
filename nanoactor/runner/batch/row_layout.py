"""Layout of a step's rows: as chunks of tokens, as rows of one token, or as deferred choices; pure
logic.

A row that computes a single output token can attend like the decode batch. After an interruption of
the stream, such rows reproduce the decode batch's results. The tokens of a run that a grammar
forces can be laid out in the same way, if the device allows several rows of one sequence: the step
then remains a decode step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32
from nanoactor.messages.rows import KEEP, POOL, SAMPLE, SCORE, Rows, StepRows
from nanoactor.runner.batch.inputs import NONE, Long

# Maximum number of tokens in a run that is split into rows: each row reads the whole context, but a
# chunk reads it only once.
LONGEST_RUN = 16


class Continued(NamedTuple):
    """Rows of one token after the decode batch: those that sample, those whose state is not read,
    then those whose state is kept."""

    slots: Long
    positions: Long
    token_ids: Int32
    resumed: Long
    """Rows that sample, as indices into `StepRows.others`."""
    kept: Long
    """Slots of the rows whose state is kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step that do not decode, by how they are computed.

    Rows are given as indices into `StepRows.others`.
    """

    rows: StepRows
    chunks: Long
    """Rows that are computed as chunks of tokens."""
    choices: Long
    firsts: Long
    """Index of each row's first token id."""
    lengths: Long
    """Length of the slot's sequence after each row, in positions; a copy has the length of its
    source."""
    sampled: Long
    """Chunks and copies after which a token is sampled."""
    kept: Long
    """Chunks and copies whose state is kept."""
    pooled: Long
    """Chunks that are pooled."""
    ends: Long
    """For each row of `sampled`, `kept` and `pooled`, the chunk whose last state it reads."""
    behind: Continued

    @property
    def moved(self) -> Long:
        """Return the rows that change the length of their slot."""
        others = self.rows.others
        return ((others.counts > 0) | others.copies).nonzero()[0] if len(others) else NONE

    @classmethod
    def of(
        cls, rows: StepRows, token_ids: Int32, outputs: Int32, room: int, runs_from: int
    ) -> StepLayout:
        """Choose how each row is computed.

        `outputs` are the positions at which outputs start, by slot. `room` is the maximum number of
        rows that attend like decode rows, 0 if none may. A step may have several rows of one
        sequence if it has at least `runs_from` such rows.
        """
        others = rows.others
        if not len(others):
            return cls(rows, *(NONE,) * 8, NO_CONTINUED)
        single = _singles(others, len(rows.decode_slots), outputs, room, runs_from)
        chunks = ((others.counts > 0) & ~single).nonzero()[0]
        lengths = (others.starts + others.counts).astype(np.int64)
        every = read = chunks
        if len(others.sources):
            copies = others.copies.nonzero()[0]
            sources = _sources(others, copies, chunks)
            lengths[copies] = lengths[sources]
            every, read = np.concatenate((chunks, copies)), np.concatenate((chunks, sources))
        ids = others.ids
        firsts = (ids.cumsum() - ids).astype(np.int64)
        wants = others.wants[every]
        samples, keeps, pools = wants & SAMPLE > 0, wants & KEEP > 0, wants & POOL > 0
        return cls(
            rows,
            chunks,
            choices=others.choices.nonzero()[0],
            firsts=firsts,
            lengths=lengths,
            sampled=every[samples],
            kept=every[keeps],
            pooled=every[pools],
            ends=np.concatenate((read[samples], read[keeps], read[pools])),
            behind=_continued(others, single.nonzero()[0], token_ids, firsts),
        )

    @property
    def samplers(self) -> tuple[Long, Long, Long]:
        """Return the slot of each row that chooses a token, the position of that token, and the
        row's index in the step, all in the order of `Update`."""
        decode, starts, others = self.rows
        if not len(others):
            return decode, starts + 1, np.arange(len(decode))
        late = np.concatenate((self.behind.resumed, self.choices))
        slots, first = others.slots.astype(np.int64), len(decode)
        return (
            np.concatenate((slots[self.sampled], decode, slots[late])),
            np.concatenate((self.lengths[self.sampled], starts + 1, self.lengths[late])),
            np.concatenate((self.sampled + first, np.arange(first), late + first)),
        )


def _sources(others: Rows, copies: Long, chunks: Long) -> Long:
    """Return the chunk that each copy reads."""
    by_slot = dict(zip(others.slots[chunks].tolist(), chunks.tolist(), strict=True))
    return np.array([by_slot[slot] for slot in others.sources[copies].tolist()], np.int64)


def _singles(
    others: Rows, decodes: int, outputs: Int32, room: int, runs_from: int
) -> NDArray[np.bool_]:
    counts, wants = others.counts, others.wants
    continues = others.starts >= outputs[others.slots]
    if not room or not continues.any():  # the case for most prompts
        return np.zeros(len(others), np.bool_)
    continues &= (counts > 0) & (wants & SCORE == 0)
    single: NDArray[np.bool_] = continues & (counts == 1)
    runs = continues & (wants & KEEP > 0) & (counts > 1) & (counts <= LONGEST_RUN)
    if runs.any():
        first = decodes + int(single.sum())
        ends = first + np.cumsum(counts * runs)
        runs &= ends <= room
        if first + int(counts[runs].sum()) >= runs_from:
            single |= runs
    return single


NO_CONTINUED = Continued(NONE, NONE, np.empty(0, np.int32), NONE, NONE)


def _continued(others: Rows, places: Long, token_ids: Int32, firsts: Long) -> Continued:
    """Lay out the rows at `places` as rows of one token each; `firsts` are the indices in
    `token_ids` of the first token of each row in `others`."""
    if not len(places):
        return NO_CONTINUED
    sampling: list[tuple[int, int, int]] = []
    silent: list[tuple[int, int, int]] = []
    kept: list[tuple[int, int, int]] = []
    resumed: list[int] = []
    rows = others.take(places)
    columns = (places, rows.slots, rows.starts, rows.counts, rows.wants, firsts[places])
    for place, slot, start, count, wants, token in zip(*(c.tolist() for c in columns), strict=True):
        each = [(slot, start + offset, token + offset) for offset in range(count)]
        silent += each[:-1]
        if wants & SAMPLE:
            sampling.append(each[-1])
            resumed.append(place)
        else:
            (kept if wants & KEEP else silent).append(each[-1])
    slots, positions, tokens = np.array(sampling + silent + kept, np.int64).T.copy()
    last = slots[len(slots) - len(kept) :]
    return Continued(slots, positions, token_ids[tokens], np.array(resumed, np.int64), last)
