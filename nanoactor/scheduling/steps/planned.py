"""Planned steps and their rows, kept until their results arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanoactor.messages.engine import Int32, Int64
from nanoactor.messages.rows import KEEP, NO_ROWS, POOL, SAMPLE, SCORE, Rows
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch


def as_int32(values: Iterable[int]) -> Int32:
    """Return the values as a new int32 array."""
    return np.array(list(values), np.int32)


def as_int64(values: Iterable[int]) -> Int64:
    """Return the values as a new int64 array."""
    return np.array(list(values), np.int64)


class PlannedRow(NamedTuple):
    """A row of a planned step outside the decode batch: a range of positions of one sequence, or a
    sample."""

    sequence: Sequence
    slot: int
    """The sequence's slot at planning time."""
    start: int
    length: int
    wants: int
    """Flags (`nanoactor.messages.rows.Want`) for what the row yields, as a plain int."""
    source: int = -1
    """Slot that this row's sequence is copied from; -1 if it does not start as a copy."""

    @property
    def samples(self) -> bool:
        """True if the row yields a token."""
        return self.wants & SAMPLE > 0

    @property
    def pools(self) -> bool:
        """True if the row yields a pooled vector."""
        return self.wants & POOL > 0

    @property
    def is_choice(self) -> bool:
        """True if the row computes nothing and only samples, from the hidden state kept in its
        slot."""
        return not self.length and self.source < 0

    @property
    def num_scored(self) -> int:
        """Number of prompt log-probabilities that the row yields: one per position, for the token
        after it."""
        last = self.sequence.prompt_length - 1
        return min(self.length, last - self.start) if self.wants & SCORE else 0

    @property
    def may_decode(self) -> bool:
        """True if the runners may compute the row as one or more decode rows."""
        short = self.length <= 1 or self.wants & KEEP > 0
        return short and self.start >= self.sequence.prompt_length


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """The rows of a step: the decode batch, one row per slot in ascending order, then the other
    rows."""

    step: int
    decode_batch: DecodeBatch
    rows: list[PlannedRow]
    encodes: bool = False
    """True if the step encodes any part of an image or video."""

    @property
    def is_decode_step(self) -> bool:
        """True if the step has decode rows, computes no prompts, and encodes no images."""
        if not len(self.decode_batch.slots) or self.encodes:
            return False
        return all(row.may_decode for row in self.rows)

    @property
    def counts(self) -> Int32:
        """Number of tokens that each row of the step yields, 0 or 1 (int32); empty if every row
        yields one."""
        if all(row.samples for row in self.rows):
            return NO_ROWS.slots
        return as_int32([*[1] * len(self.decode_batch.slots), *(row.samples for row in self.rows)])

    @property
    def num_sampled(self) -> int:
        """Total number of tokens that the step yields."""
        return len(self.decode_batch.slots) + sum(row.samples for row in self.rows)

    @property
    def num_positions(self) -> int:
        """Number of positions that the step computes outside the decode batch."""
        return sum(row.length for row in self.rows)

    def note_begin(self, at: int) -> None:
        """Record the step's start time, in ns of the monotonic clock, for sequences with no earlier
        step."""
        for row in self.rows:
            row.sequence.history.note_begin(at)

    def has_row(self, slot: int) -> bool:
        """Return True if the step contains the sequence that held this slot at planning time."""
        return bool(self.decode_batch.members[slot]) or any(row.slot == slot for row in self.rows)


def as_rows(rows: list[PlannedRow]) -> Rows:
    """Return the rows as a `Rows` message, with one array per field."""
    if not rows:
        return NO_ROWS
    slots, starts, counts, wants, sources = zip(*(row[1:] for row in rows), strict=True)
    has_copies = any(source >= 0 for source in sources)
    return Rows(
        as_int32(slots),
        as_int32(starts),
        as_int32(counts),
        np.array(wants, np.uint8),
        as_int32(sources if has_copies else ()),
    )
