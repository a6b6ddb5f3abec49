"""How each slot samples, as the runner's host knows it."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admissions
from nanoactor.models.limits import CANDIDATES

Long = NDArray[np.int64]
NO_ROWS: Long = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """How the rows that sample do it; see `nanoactor.models.batch.SamplingBatch`."""

    slots: Long
    token_index: Long
    """Which token of the step each row samples after."""
    positions: Long
    temperature: NDArray[np.float32]
    top_k: Long
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: Long
    greedy: Long
    plain: Long
    limited: Long
    unlimited: Long
    nucleus: Long
    masked_rows: Long
    masked_ids: Long


class SamplingTable:
    """Sampling parameters by slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self._unmasked_from = np.zeros(max_num_seqs, np.int64)
        self._masked: dict[int, Long] = {}

    def admit(self, new: Admissions) -> None:
        """Take the parameters of new sequences."""
        slots = new.slots
        self.temperature[slots] = new.temperature
        self.top_k[slots] = new.top_k
        self.top_p[slots] = new.top_p
        self.min_p[slots] = new.min_p
        self.seeds[slots] = new.seed.astype(np.int64)
        # What masks nothing needs no masking.
        self._unmasked_from[slots] = np.where(new.masked_counts > 0, new.unmasked_from, 0)
        ends = np.cumsum(new.masked_counts)
        for slot, end, count in zip(
            slots.tolist(), ends.tolist(), new.masked_counts.tolist(), strict=True
        ):
            self._masked[slot] = new.masked_ids[end - count : end].astype(np.int64)

    def rows(self, slots: Long, token_index: Long, positions: Long) -> SampledRows:
        """How these sample the tokens that will have these positions."""
        temperature, top_k = self.temperature[slots], self.top_k[slots]
        top_p, min_p = self.top_p[slots], self.min_p[slots]
        greedy = temperature == 0
        limited = ~greedy & (top_k > 0) & (top_k <= CANDIDATES)
        unlimited = ~greedy & (top_k > CANDIDATES)
        nucleus = ~greedy & (top_k == 0) & ((top_p < 1) | (min_p > 0))
        return SampledRows(
            slots,
            token_index,
            positions,
            np.where(greedy, np.float32(1), temperature),
            top_k,
            top_p,
            min_p,
            self.seeds[slots],
            np.flatnonzero(greedy),
            np.flatnonzero(~(greedy | limited | unlimited | nucleus)),
            np.flatnonzero(limited),
            np.flatnonzero(unlimited),
            np.flatnonzero(nucleus),
            *self.masked_logits(slots, positions),
        )

    def cut_from_all(self, slots: Long) -> NDArray[np.bool_]:
        """Which of these are cut, but by no top-k that leaves few candidates."""
        top_k = self.top_k[slots]
        cut = (top_k > CANDIDATES) | (self.top_p[slots] < 1) | (self.min_p[slots] > 0)
        few = (top_k > 0) & (top_k <= CANDIDATES)
        kept: NDArray[np.bool_] = cut & ~few & (self.temperature[slots] > 0)
        return kept

    def sampling(self, slots: Long) -> NDArray[np.bool_]:
        """Which of these are not greedy."""
        drawn: NDArray[np.bool_] = self.temperature[slots] > 0
        return drawn

    def masking(self, slots: Long, positions: Long) -> NDArray[np.bool_]:
        """Which of these may not sample some ids yet (`min_tokens`)."""
        early: NDArray[np.bool_] = positions < self._unmasked_from[slots]
        return early

    def masked_steps(self, slots: Long, positions: Long) -> int:
        """How many more tokens until all of these may sample every id."""
        return max(0, int((self._unmasked_from[slots] - positions).max(initial=0)))

    def masked_logits(self, slots: Long, positions: Long) -> tuple[Long, Long]:
        """(row, id) of each logit that must not be chosen."""
        masking = self.masking(slots, positions)
        if not masking.any():
            return NO_ROWS, NO_ROWS
        rows, ids = [], []
        for row in np.flatnonzero(masking).tolist():
            masked = self._masked[int(slots[row])]
            rows.append(np.full(len(masked), row, np.int64))
            ids.append(masked)
        return np.concatenate(rows), np.concatenate(ids)
