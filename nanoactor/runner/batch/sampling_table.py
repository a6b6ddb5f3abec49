"""Sampling parameters of each slot, stored on the runner's host, and the grouping of a step's rows
by sampling method."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Admissions, Int32, TokenRules
from nanoactor.models.limits import CANDIDATES
from nanoactor.models.options import FusedSampling
from nanoactor.models.sampling.columns import NEUTRAL, UNFUSED, WORDS, column_views
from nanoactor.models.sampling.rows import LogitRules, SamplingGroups
from nanoactor.runner.batch.inputs import NO_INDICES, Array, Long, SampledRows
from nanoactor.runner.batch.ruled_rows import lay_out_rules
from nanoactor.runtime.codec import copy_arrays

Flags = NDArray[np.bool_]


class SamplingTable:
    """The sampling parameters, `min_tokens` masks and token rules of all sequences, by slot (a
    sequence's index in the batch)."""

    def __init__(self, max_num_seqs: int) -> None:
        self.words: Int32 = np.zeros((WORDS, max_num_seqs), np.int32)
        """Packed parameters, int32 (WORDS, slots), in the format of
        `nanoactor.models.sampling.columns`."""
        self.columns = column_views(self.words, np.float32)
        self._unmasked_from = np.zeros(max_num_seqs, np.int64)
        self._masked: dict[int, Long] = {}
        self._rules: dict[int, TokenRules] = {}
        self._ruled = np.zeros(max_num_seqs, np.bool_)
        """True for each slot with token rules or penalties, (slots,)."""

    def admit(self, new: Admissions) -> None:
        """Record the sampling parameters and rules of newly admitted sequences."""
        slots = new.slots
        self.words[:, slots] = new.sampling.T
        # Rows without masked ids need no masking.
        self._unmasked_from[slots] = np.where(new.masked_counts > 0, new.unmasked_from, 0)
        ends = np.cumsum(new.masked_counts)
        for slot, end, count in zip(
            slots.tolist(), ends.tolist(), new.masked_counts.tolist(), strict=True
        ):
            self._masked[slot] = new.masked_ids[end - count : end].astype(np.int64)
            self._rules.pop(slot, None)
        for slot, rules in zip(slots[new.rule_rows].tolist(), new.rules, strict=True):
            self._rules[slot] = copy_arrays(rules)
        self._ruled[slots] = self._penalized(slots)
        self._ruled[slots[new.rule_rows]] = True

    def _penalized(self, slots: NDArray[np.integer]) -> Flags:
        """Return, for each slot, True if it has a penalty or another parameter that no fused
        sampler supports."""
        penalized = np.zeros(len(slots), np.bool_)
        for name in UNFUSED:
            penalized |= getattr(self.columns, name)[slots] != NEUTRAL[name]
        return penalized

    def seeds(self, slots: Long) -> Long:
        """Return the seeds of these slots: unsigned 64-bit numbers, as int64 with the same bits."""
        low, high = self.columns.seed[:, slots].astype(np.int64)
        seeds: Long = (low & 0xFFFFFFFF) | (high << 32)
        return seeds

    def rows(self, slots: Long, index: Long) -> SampledRows[Array]:
        """Return the sampling inputs of these slots, including sampling groups and rules, but
        without the ids that `min_tokens` masks. `index` is stored in the result as it is."""
        greedy = self.columns.temperature[slots] == 0
        limited, truncated = self._limited(slots), self._truncated(slots)
        unlimited = self.columns.top_k[slots] > CANDIDATES
        return SampledRows(
            slots,
            index,
            SamplingGroups(
                greedy=np.flatnonzero(greedy),
                plain=np.flatnonzero(~greedy & ~limited & ~truncated),
                limited=np.flatnonzero(~greedy & limited),
                unlimited=np.flatnonzero(~greedy & unlimited),
                nucleus=np.flatnonzero(~greedy & ~limited & ~unlimited & truncated),
                masked_rows=NO_INDICES,
                masked_ids=NO_INDICES,
            ),
            rules=self._rules_of(slots) if self._ruled[slots].any() else None,
        )

    def _rules_of(self, slots: Long) -> LogitRules[Array]:
        known = [(row, self._rules.get(slot)) for row, slot in enumerate(slots.tolist())]
        found = [(row, rules) for row, rules in known if rules is not None]
        return lay_out_rules(found, np.flatnonzero(self._penalized(slots)))

    def _limited(self, slots: Long) -> Flags:
        """Return, for each slot, True if it has a top-k of at most `CANDIDATES`, which leaves only
        a few candidates."""
        top_k = self.columns.top_k[slots]
        few: Flags = (top_k > 0) & (top_k <= CANDIDATES)
        return few

    def _truncated(self, slots: Long) -> Flags:
        """Return, for each slot, True if it has a larger top-k, a top-p or a min-p, which may leave
        any number of candidates."""
        columns = self.columns
        cut: Flags = columns.top_k[slots] > CANDIDATES
        return cut | (columns.top_p[slots] < 1) | (columns.min_p[slots] > 0)

    def never_fused(self, slots: Long, fused: FusedSampling) -> Flags:
        """Return, for each slot, True if a fused sampler of this kind never handles it, for example
        because its request has logit rules (`LogitRules`)."""
        if fused == "none":
            return np.ones(len(slots), np.bool_)
        is_random: Flags = self.columns.temperature[slots] > 0
        ruled: Flags = self._ruled[slots]
        if fused == "greedy":
            return is_random | ruled
        exceeds_candidates = self.columns.top_k[slots] > CANDIDATES
        return ruled | (exceeds_candidates & is_random & (fused != "all"))

    def masking(self, slots: Long, positions: Long) -> Flags:
        """Return, for each slot, True if some ids may not be sampled yet (`min_tokens`).
        `positions` are the positions of the tokens to sample."""
        masked: Flags = positions < self._unmasked_from[slots]
        return masked

    def masked_steps(self, slots: Long, positions: Long) -> int:
        """Return the number of tokens after which all of these slots may sample every id
        (`min_tokens`). `positions` are the positions of the next tokens to sample."""
        return max(0, int((self._unmasked_from[slots] - positions).max(initial=0)))

    def masked(self, rows: SampledRows[Array], positions: Long) -> SampledRows[Array]:
        """Return `rows`, extended by the ids that must not be sampled yet (`min_tokens`).
        `positions` are the positions of the tokens to sample."""
        masking = self.masking(rows.slots, positions)
        if not masking.any():
            return rows
        numbers, ids = [], []
        for row in np.flatnonzero(masking).tolist():
            masked = self._masked[int(rows.slots[row])]
            numbers.append(np.full(len(masked), row, np.int64))
            ids.append(masked)
        groups = dataclasses.replace(
            rows.groups, masked_rows=np.concatenate(numbers), masked_ids=np.concatenate(ids)
        )
        return dataclasses.replace(rows, groups=groups)
