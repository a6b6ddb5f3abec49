"""Steps that nobody asked for: the largest ones, to compile for and to measure."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.messages import Admissions, Int32, Step
from nanoactor.models.lengths import HostLengths
from nanoactor.runner.resident import SPECIAL_AT_ONCE, Update
from nanoactor.runner.sampling_table import SamplingTable

_NONE: Int32 = np.empty(0, np.int32)


def admissions(slots: Int32, top_p: float = 1.0) -> Admissions:
    """Sequences that sample with this top-p."""
    count = len(slots)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    whole = np.zeros(count, np.int32)
    seeds = np.zeros(count, np.uint64)
    return Admissions(
        slots, ones, whole, ones * np.float32(top_p), zeros, seeds, whole, _NONE, whole
    )


def prefill_step(tokens: int, rows: int, block_size: int) -> Step:
    """Prompts of so many tokens in all, in so many rows, each of which samples."""
    counts = np.full(rows, tokens // rows, np.int32)
    counts[: tokens % rows] += 1
    slots = np.arange(rows, dtype=np.int32)
    # Room for one more token each, which a decode step may then add.
    blocks = (counts // block_size + 1).astype(np.int32)
    return Step(
        1,
        slots,
        np.zeros(rows, np.int32),
        counts,
        np.ones(rows, np.bool_),
        np.zeros(tokens, np.int32),
        _NONE,
        _NONE,
        slots,
        np.zeros(rows, np.int32),
        blocks,
        np.arange(int(blocks.sum()), dtype=np.int32),
        admissions(slots),
    )


def decode_update(rows: int, dummy: int, top_p: float = 1.0) -> Update:
    """One token for each of so many rows, all of them the dummy's, which write to places of their
    own; `dummy` is its slot. With a top-p below 1 all are sampled behind the graph, a few at a
    time."""
    table = SamplingTable(rows)
    slots = np.arange(rows)
    table.admit(admissions(slots.astype(np.int32), top_p))
    special = (
        ()
        if top_p == 1
        else tuple(
            dataclasses.replace(
                table.rows(part, part, np.zeros(len(part), np.int64)),
                slots=np.full(len(part), dummy),
            )
            for part in np.split(slots, range(SPECIAL_AT_ONCE, rows, SPECIAL_AT_ONCE))
        )
    )
    none = np.empty(0, np.int64)
    lengths = HostLengths([], [], [1] * rows)
    return Update(none, _NONE, None, rows, special, lengths)


def longest_lengths(rows: int, blocks: int, block_size: int, most: int) -> HostLengths:
    """What so many decode rows can be at their longest in a cache of so many blocks: the first as
    long as one can be, all together as long as fits. What is captured must be no shorter, and
    operators ask for as many blocks as all rows have in sum."""
    lengths, left = [], blocks
    for after in range(rows - 1, -1, -1):
        own = max(1, min(-(-most // block_size), left - after))
        lengths.append(min(most, own * block_size))
        left -= own
    return HostLengths([], [], lengths)
