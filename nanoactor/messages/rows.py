"""The rows of a step: what each row computes and yields, and how rows are transferred.

A row computes `count` positions, from `start` on, of the sequence in one slot (index in the running
batch). Prompt chunks, decode rows, forced tokens, copies, and samples under a mask are all rows.
Their order does not matter.
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
    """Flags that determine what a row computes and yields."""

    SAMPLE = 1
    """Sample the token after the row's last position. A row without positions samples under a mask,
    from the hidden state kept in its slot."""
    KEEP = 2
    """Keep the hidden state of the row's last position in its slot, so that a later row can sample
    from it."""
    SCORE = 4
    """Compute the log-probabilities of the tokens that follow the row's positions, except the token
    after the prompt's last position. The token that follows the row's last position is sent after
    the row's own tokens."""
    DECODE = 8
    """Compute the position of a token that an earlier step sampled and that the host may not know
    yet. The row is repeated in every later step, each time one position further, until its slot is
    listed in `leaves`."""
    POOL = 16
    """Yield the pooled vector of the row's positions."""


# NumPy operations are five times as fast with plain ints as with an `IntFlag`.
SAMPLE, KEEP, SCORE, DECODE, POOL = (int(want) for want in Want)


@message(19)
class Rows:
    """Rows of a step, one array per field."""

    slots: Int32
    starts: Int32
    counts: Int32
    wants: NDArray[np.uint8]
    """Flags of each row (`Want`)."""
    sources: Int32
    """Slot of the source row of each row that is a copy; -1 for other rows, and empty if there are
    no copies. A copy samples from, or keeps, the hidden state of its source's last position, and
    computes no position itself."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.slots)

    @property
    def copies(self) -> Flags:
        """True for each row that is a copy, which uses the hidden state of another row, (rows,)."""
        if not len(self.sources):
            return np.zeros(len(self), np.bool_)
        copies: Flags = self.sources >= 0
        return copies

    @property
    def choices(self) -> Flags:
        """True for each row that samples from the hidden state kept in its slot, (rows,)."""
        choices: Flags = (self.counts == 0) & ~self.copies
        return choices

    @property
    def ids(self) -> Int32:
        """Number of token ids that are sent for each row, int32; 0 for decode rows."""
        sent = self.counts + (self.wants & SCORE > 0)
        sent *= self.wants & DECODE == 0
        return sent

    def take(self, index: NDArray[np.integer] | Flags) -> Rows:
        """Return the rows selected by `index`, an array of indices or a bool mask."""
        sources = self.sources[index] if len(self.sources) else self.sources
        return Rows(
            self.slots[index], self.starts[index], self.counts[index], self.wants[index], sources
        )


_NOTHING = np.empty(0, np.int32)
NO_ROWS = Rows(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.uint8), _NOTHING)


class StepRows(NamedTuple):
    """All rows of a step: decode rows in ascending order of their slots, then the other rows in the
    order in which they were sent. Results refer to rows by their index in this order."""

    decode_slots: Long
    """Slots of the decode rows, in ascending order."""
    decode_starts: Long
    others: Rows

    def __len__(self) -> int:
        """Return the number of rows, including decode rows."""
        return len(self.decode_slots) + len(self.others)

    @property
    def counts(self) -> Int32:
        """Number of tokens that each row yields, 0 or 1; empty if each row yields one."""
        if not len(self.others):
            return _NOTHING
        samples = self.others.wants & SAMPLE > 0
        if samples.all():
            return _NOTHING
        decodes = np.ones(len(self.decode_slots), np.int32)
        return np.concatenate((decodes, samples.astype(np.int32)))


class RowExpander:
    """State with which a receiver restores all rows of each step from the rows that were sent and
    the slots that left the decode batch.

    This is the inverse of `compress_rows`. Steps must be expanded in order.
    """

    def __init__(self, slots: int) -> None:
        self._by_slot = np.full(slots, _NOT_DECODING, np.int64)
        self._slots: Long = np.empty(0, np.int64)
        self._starts: Long = np.empty(0, np.int64)
        """Start position of each decode row in the next step."""

    def expand(self, rows: Rows, leaves: Int32) -> StepRows:
        """Return all rows of the next step. `rows` are the rows that were sent, and `leaves` are
        the slots that leave the decode batch. If no slot joins or leaves, this costs a single array
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
    """Return the rows to send, and the slots that leave the decode batch. Rows that continue to
    decode are not sent.

    `before` and `after`, (slots,), are True for the slots that decode in the previous step and in
    this one. `starts` contains, by slot, the start positions of this step's decode rows. `others`
    are the rows that do not decode.
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
    """Return the concatenation of ranges: for each i, `counts[i]` consecutive numbers from
    `starts[i]` on."""
    if len(counts) == 1:
        begin = int(starts[0])
        return np.arange(begin, begin + int(counts[0]))
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    ranges: Long = ((starts - (ends - counts)).repeat(counts) + np.arange(total)).astype(np.int64)
    return ranges
