"""The rows of a step: what each computes and returns, and how they are sent.

A row computes `count` positions of one slot's sequence from `start` on. Prompt chunks, decode rows,
forced tokens, copies and choices under a mask are all rows, and their order means nothing.
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
    """Flags of a row."""

    SAMPLE = 1
    """Choose the token after the row's last position. A row without positions chooses it under a
    mask, from the state that its slot keeps."""
    KEEP = 2
    """Keep the state of its last position in its slot, for a later choice."""
    SCORE = 4
    """Score the successors of the row's positions, except that of the prompt's last position. The
    successor of the row's own last position is sent after the row's tokens."""
    DECODE = 8
    """Compute the token that an earlier step chose, which the host may not know yet. The row is
    repeated one position further in every later step until its slot leaves."""
    POOL = 16
    """Return the pooled vector of its positions."""


# NumPy is five times as fast with plain numbers as with an `IntFlag`.
SAMPLE, KEEP, SCORE, DECODE, POOL = (int(want) for want in Want)


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
        """Select the rows that are copies."""
        if not len(self.sources):
            return np.zeros(len(self), np.bool_)
        copies: Flags = self.sources >= 0
        return copies

    @property
    def choices(self) -> Flags:
        """Select the rows that choose from the state that their slots keep."""
        choices: Flags = (self.counts == 0) & ~self.copies
        return choices

    @property
    def ids(self) -> Int32:
        """Return the number of token ids that are sent for each row."""
        sent = self.counts + (self.wants & SCORE > 0)
        sent *= self.wants & DECODE == 0
        return sent

    def take(self, index: NDArray[np.integer] | Flags) -> Rows:
        """Return some of the rows."""
        sources = self.sources[index] if len(self.sources) else self.sources
        return Rows(
            self.slots[index], self.starts[index], self.counts[index], self.wants[index], sources
        )


_NOTHING = np.empty(0, np.int32)
NO_ROWS = Rows(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.uint8), _NOTHING)


class StepRows(NamedTuple):
    """All rows of a step: those that decode, by slot, then the others in the order sent. Results
    name rows by their place in this order."""

    decode_slots: Long
    """Slots of the decode rows, in ascending order."""
    decode_starts: Long
    others: Rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.decode_slots) + len(self.others)

    @property
    def counts(self) -> Int32:
        """Return the number of tokens that each row yields; empty if it is one for each."""
        if not len(self.others):
            return _NOTHING
        samples = self.others.wants & SAMPLE > 0
        if samples.all():
            return _NOTHING
        decodes = np.ones(len(self.decode_slots), np.int32)
        return np.concatenate((decodes, samples.astype(np.int32)))


class RowExpander:
    """Restores all rows of each step from the rows that were sent and the slots that leave.

    The inverse is `compressed`. Steps must come in order.
    """

    def __init__(self, slots: int) -> None:
        self._by_slot = np.full(slots, _NOT_DECODING, np.int64)
        self._slots: Long = np.empty(0, np.int64)
        self._starts: Long = np.empty(0, np.int64)
        """Starts of the next step's decode rows."""

    def expand(self, rows: Rows, leaves: Int32) -> StepRows:
        """Return the rows of the next step; a steady one takes a single array operation."""
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


def compressed(
    before: Flags, now: Flags, starts: NDArray[np.integer], others: Rows
) -> tuple[Rows, Int32]:
    """Return the rows to send, and the slots that leave.

    `before` and `now` select the slots that decode in the previous step and in this one, and
    `starts` are the positions by slot at which those of this step start.
    """
    changed = np.flatnonzero(before != now).astype(np.int32)
    joins = changed[now[changed]]
    leaves = changed[~now[changed]]
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


def counted_up(begins: NDArray[np.integer], counts: NDArray[np.integer]) -> Long:
    """Concatenate a range of `counts` numbers from each of `begins`."""
    if len(counts) == 1:
        begin = int(begins[0])
        return np.arange(begin, begin + int(counts[0]))
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    found: Long = ((begins - (ends - counts)).repeat(counts) + np.arange(total)).astype(np.int64)
    return found
