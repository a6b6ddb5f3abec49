"""The rows of a step: what each row computes and returns, and how rows are sent.

A row computes `count` positions of the sequence in one slot, from `start` on. Prompt chunks, decode
rows, forced tokens, copies and choices under a mask are all rows, and the order of rows has no
meaning.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Long = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NOT_DECODING = -1


class Want(enum.IntFlag):
    """Flags that determine what a row computes and returns."""

    SAMPLE = 1
    """Sample the token after the row's last position. A row without positions samples it under a
    mask, from the state kept in its slot."""
    KEEP = 2
    """Keep the state of the row's last position in its slot, to sample from it later."""
    SCORE = 4
    """Score the tokens that follow the row's positions, except the one after the prompt's last
    position. The token after the row's own last position is sent after the row's tokens."""
    DECODE = 8
    """Compute the position of the token that an earlier step sampled, which the host may not know
    yet. The row is repeated in every later step, one position further each time, until its slot
    leaves."""
    POOL = 16
    """Return the pooled vector of the row's positions."""


# NumPy is five times as fast with plain numbers as with an `IntFlag`.
SAMPLE, KEEP, SCORE, DECODE, POOL = (int(want) for want in Want)


@message(19)
class Rows:
    """Rows of a step, as columns."""

    slots: Int32
    starts: Int32
    counts: Int32
    wants: NDArray[np.uint8]
    """Flags of `Want`, one value per row."""
    sources: Int32
    """For a row that is a copy, the slot of its source row: the copy samples from, or keeps, the
    state of the source's last position, and has no position of its own. -1 for all other rows;
    empty if there are no copies."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.slots)

    @property
    def copies(self) -> Flags:
        """Return a mask of the rows that are copies."""
        if not len(self.sources):
            return np.zeros(len(self), np.bool_)
        copies: Flags = self.sources >= 0
        return copies

    @property
    def choices(self) -> Flags:
        """Return a mask of the rows that sample from the state kept in their slots."""
        choices: Flags = (self.counts == 0) & ~self.copies
        return choices

    @property
    def ids(self) -> Int32:
        """Return the number of token ids that are sent for each row."""
        sent = self.counts + (self.wants & SCORE > 0)
        sent *= self.wants & DECODE == 0
        return sent

    def take(self, index: NDArray[np.integer] | Flags) -> Rows:
        """Return the rows that `index` selects."""
        sources = self.sources[index] if len(self.sources) else self.sources
        return Rows(
            self.slots[index], self.starts[index], self.counts[index], self.wants[index], sources
        )


_NOTHING = np.empty(0, np.int32)
NO_ROWS = Rows(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.uint8), _NOTHING)


class StepRows(NamedTuple):
    """All rows of a step: decode rows in the order of their slots, then the other rows in the order
    in which they were sent. Results refer to rows by their index in this order."""

    decode_slots: Long
    """Slots of the decode rows, in ascending order."""
    decode_starts: Long
    others: Rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.decode_slots) + len(self.others)

    @property
    def counts(self) -> Int32:
        """Return the number of tokens that each row yields; empty if each row yields one."""
        if not len(self.others):
            return _NOTHING
        samples = self.others.wants & SAMPLE > 0
        if samples.all():
            return _NOTHING
        decodes = np.ones(len(self.decode_slots), np.int32)
        return np.concatenate((decodes, samples.astype(np.int32)))


class RowExpander:
    """Expands the rows that were sent, and the slots that leave, to all rows of each step.

    The inverse is `compress_rows`. Steps must be expanded in order.
    """

    def __init__(self, slots: int) -> None:
        self._by_slot = np.full(slots, _NOT_DECODING, np.int64)
        self._slots: Long = np.empty(0, np.int64)
        self._starts: Long = np.empty(0, np.int64)
        """Start positions of the next step's decode rows."""

    def expand(self, rows: Rows, leaves: Int32) -> StepRows:
        """Return all rows of the next step. If no slot joins or leaves, this takes a single array
        operation."""
        joins = rows.wants & DECODE > 0 if len(rows) else None
        if joins is not None and joins.any():
            self._change(leaves, rows.take(joins))
            rows = rows.take(~joins)
        elif len(leaves):
            self._change(leaves, NO_ROWS)
        starts = self._starts
        self._starts = starts + 1
        return StepRows(self._slots, starts, rows)

    def _change(self, leaves: Int32, joins: Rows) -> None:
        self._by_slot[self._slots] = self._starts
        self._by_slot[leaves] = _NOT_DECODING
        self._by_slot[joins.slots] = joins.starts
        self._slots = np.flatnonzero(self._by_slot != _NOT_DECODING)
        self._starts = self._by_slot[self._slots]


def compress_rows(
    before: Flags, after: Flags, starts: NDArray[np.integer], others: Rows
) -> tuple[Rows, Int32]:
    """Return the rows to send, and the slots that leave the decode batch.

    `before` and `after` select the slots that decode in the previous step and in this one. `starts`
    holds, by slot, the start positions of this step's decode rows.
    """
    changed = np.flatnonzero(before != after).astype(np.int32)
    joins = changed[after[changed]]
    leaves = changed[~after[changed]]
    if not len(joins):
        return others, leaves
    count = len(joins)
    wants = np.full(count, Want.SAMPLE | Want.DECODE, np.uint8)
    sources = others.sources
    if len(sources):
        sources = np.concatenate((np.full(count, -1, np.int32), sources))
    return (
        Rows(
            np.concatenate((joins, others.slots)),
            np.concatenate((starts[joins].astype(np.int32), others.starts)),
            np.concatenate((np.ones(count, np.int32), others.counts)),
            np.concatenate((wants, others.wants)),
            sources,
        ),
        leaves,
    )


def concatenate_ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Long:
    """Concatenate the ranges of `counts` consecutive numbers that start at `starts`."""
    if len(counts) == 1:
        begin = int(starts[0])
        return np.arange(begin, begin + int(counts[0]))
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    ranges: Long = ((starts - (ends - counts)).repeat(counts) + np.arange(total)).astype(np.int64)
    return ranges
