"""From the scheduler's choice to the arrays of a `Plan`: what changed since the plan before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanoactor.messages import Admissions, Int32, Int64, Plan
from nanoactor.scheduling.sequence import Sequence
from nanoactor.scheduling.table import Slots

PrefillChunk = tuple[Sequence, int, int, bool]
"""(sequence, first position, count, whether it ends what is to be prefilled)."""


def as_int32(values: Iterable[int]) -> Int32:
    """An int32 array of its own."""
    return np.array(list(values), np.int32)


def as_int64(values: Iterable[int]) -> Int64:
    """An int64 array of its own."""
    return np.array(list(values), np.int64)


_NOTHING = as_int32(())
_NO_FLAGS = np.empty(0, np.bool_)


class PlanBuilder:
    """Remembers the decode set as the runners last heard of it, to send only the difference."""

    def __init__(self, max_num_seqs: int) -> None:
        self._decoding = np.zeros(max_num_seqs, np.bool_)
        self._slots: Slots = np.empty(0, np.int64)

    def plan(
        self, step: int, chunks: list[PrefillChunk], decoding: Slots, grown: list[Sequence]
    ) -> Plan:
        """The message for one step."""
        joins, leaves = self._changes(decoding)
        grows = as_int32(sequence.slot for sequence in grown) if grown else _NOTHING
        if not chunks:
            starts = counts = slots = _NOTHING
            return Plan(
                step, slots, starts, counts, _NO_FLAGS, joins, leaves, grows, _NO_ADMISSIONS
            )
        return Plan(
            step,
            as_int32(chunk[0].slot for chunk in chunks),
            as_int32(chunk[1] for chunk in chunks),
            as_int32(chunk[2] for chunk in chunks),
            np.array([chunk[3] for chunk in chunks], np.bool_),
            joins,
            leaves,
            grows,
            _admissions([chunk[0] for chunk in chunks if not chunk[0].introduced]),
        )

    def _changes(self, decoding: Slots) -> tuple[Int32, Int32]:
        if decoding is self._slots:  # the table keeps the object where nothing changes
            return _NOTHING, _NOTHING
        self._slots = decoding
        now = np.zeros_like(self._decoding)
        now[decoding] = True
        changed = np.flatnonzero(now != self._decoding).astype(np.int32)
        self._decoding = now
        if not len(changed):
            return _NOTHING, _NOTHING
        joins = now[changed]
        return changed[joins], changed[~joins]


def _admissions(sequences: list[Sequence]) -> Admissions:
    masked_ids: list[int] = []
    masked_counts = []
    for sequence in sequences:
        sequence.introduced = True
        stopping = sequence.stopping
        masked = [*stopping.eos_ids, *stopping.stop_ids] if stopping.min_tokens else []
        masked_ids += masked
        masked_counts.append(len(masked))
    sampling = [sequence.sampling for sequence in sequences]
    return Admissions(
        as_int32(sequence.slot for sequence in sequences),
        np.array([s.temperature for s in sampling], np.float32),
        as_int32(s.top_k for s in sampling),
        np.array([s.top_p for s in sampling], np.float32),
        np.array([s.min_p for s in sampling], np.float32),
        np.array([s.seed for s in sampling], np.uint64),
        as_int32(s.prompt_length + s.stopping.min_tokens for s in sequences),
        as_int32(masked_ids),
        as_int32(masked_counts),
    )


_NO_ADMISSIONS = _admissions([])
