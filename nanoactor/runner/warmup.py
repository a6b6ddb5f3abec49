"""Steps that nobody asked for: the largest ones, to compile for and to measure."""

from __future__ import annotations

import numpy as np

from nanoactor.messages import Admissions, Int32, Step

_NONE: Int32 = np.empty(0, np.int32)


def _admissions(slots: Int32, top_p: float = 1.0) -> Admissions:
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
        _admissions(slots),
    )


def decode_step(rows: int, before: Step, top_p: float = 1.0) -> Step:
    """One token for each of so many slots, after a prefill step: those that had no part in it
    have a sequence of their own, one token long, in block 0. All are sampled with this top-p."""
    slots = np.arange(rows, dtype=np.int32)
    new = slots[len(before.slots) :]
    flags = np.empty(0, np.bool_)
    return Step(
        2,
        _NONE,
        _NONE,
        _NONE,
        flags,
        _NONE,
        slots,
        _NONE,
        new,
        np.zeros(len(new), np.int32),
        np.ones(len(new), np.int32),
        np.zeros(len(new), np.int32),
        _admissions(slots, top_p),
    )
