"""Conversion of steps to the few values that change in the batch's tables on the device.

All these tables are parts of one int32 array. A step's changes are pairs of an index in this array
and a new value. A decode step in which nothing changes has no such pairs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Admissions, Copies, Int32, Int64, Step
from nanoactor.messages.rows import RowExpander, concatenate_ranges
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.options import FusedSampling
from nanoactor.models.sampling.columns import WORDS
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens
from nanoactor.runner.batch.inputs import (
    NO_INDICES,
    Array,
    Inputs,
    KeptRows,
    Long,
    PooledRows,
    Prefill,
    SampledRows,
    ScoredResults,
    ScoredRows,
    Update,
)
from nanoactor.runner.batch.row_layout import Continued, StepLayout
from nanoactor.runner.batch.sampling_table import SamplingTable
from nanoactor.runner.batch.score_table import ScoreTable

# Maximum number of rows sampled at once. Sorting whole vocabularies takes 127 bytes per logit.
FALLBACK_AT_ONCE = 64
_Changes = tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]
NO_MASKS: Int32 = np.empty((0, 0), np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Offsets of all per-slot tables in the state array, a single int32 array on the device. A slot
    is a sequence's index in the batch. The last slot is a dummy for padding rows; its block is the
    one after the cache's last block."""

    slots: int
    max_blocks: int

    @property
    def dummy(self) -> int:
        """Slot of padding rows."""
        return self.slots - 1

    @property
    def lengths(self) -> int:
        """Offset of the per-slot numbers of computed positions. The block tables, one row per slot,
        precede this table."""
        return self.slots * self.max_blocks

    @property
    def last_tokens(self) -> int:
        """Offset of the newest token ids, one per slot."""
        return self.lengths + self.slots

    @property
    def frozen(self) -> int:
        """Offset of the per-slot frozen flags. 1 means that the sequence has sampled one of its
        `freeze_ids`, so that its decode rows in later steps must have no lasting effect."""
        return self.last_tokens + self.slots

    @property
    def rope_deltas(self) -> int:
        """Offset of the per-slot rope deltas: rotary position minus index, for tokens after the
        prompt. This table and those after it, up to `rows`, are set when a sequence is admitted."""
        return self.frozen + self.slots

    @property
    def prompt_lengths(self) -> int:
        """Offset of the per-slot prompt lengths, the positions at which outputs begin."""
        return self.rope_deltas + self.slots

    @property
    def freeze_ids(self) -> int:
        """Offset of the token ids after which the device stops decoding each slot, because the
        sequence ends or continues under grammar masks. They are stored column by column."""
        return self.prompt_lengths + self.slots

    @property
    def sampling(self) -> int:
        """Offset of the per-slot sampling parameters, which are stored column by column, as in
        `models/sampling/columns.py`."""
        return self.freeze_ids + MAX_FREEZE_IDS * self.slots

    @property
    def rows(self) -> int:
        """Offset of the slots of all decode rows: the decode batch in ascending order, then other
        rows of one token, then dummies."""
        return self.sampling + WORDS * self.slots

    @property
    def row_positions(self) -> int:
        """Offset of the positions of the rows in `rows`, one per row. A position of -1 means the
        next position of the row's slot."""
        return self.rows + self.slots

    @property
    def row_token_ids(self) -> int:
        """Offset of the token ids of the rows in `rows`, one per row. Used only for rows whose
        position is given (not -1)."""
        return self.row_positions + self.slots

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return self.row_token_ids + self.slots


@dataclasses.dataclass(frozen=True, slots=True)
class BatchTraits:
    """Properties of a device and model that determine how steps are laid out; most are from
    `DeviceTraits`."""

    tokens_per_program: int = 1 << 30
    needs_host_seq_lens: bool = False
    fused_sampling: FusedSampling = "none"
    fallback_at_once: int = FALLBACK_AT_ONCE
    """Maximum number of rows that are sampled at once outside the fused sampler."""
    min_rows_for_runs: int = 1 << 30
    """Minimum number of decode rows of a step that may contain several rows of one sequence."""
    has_slot_state: bool = False
    """True if layers keep state outside of blocks, which must be reset for each new sequence."""


class HostBatch:
    """The host's side of the batch: sampling parameters by slot, and values derived from them for
    the current decode batch. Converts each step to an `Update`."""

    def __init__(
        self, max_num_seqs: int, max_blocks: int, traits: BatchTraits, pooling: str = ""
    ) -> None:
        """Create an empty batch. `max_blocks` is the length of a block table. `pooling` is the
        model's `PoolingConfig.kind`; empty if it does not pool."""
        self._traits, self._pooling = traits, pooling
        self.layout = StateLayout(max_num_seqs + 1, max_blocks)
        self.sampling = SamplingTable(max_num_seqs)
        self._scores = ScoreTable(max_num_seqs)
        self._outputs = np.zeros(max_num_seqs, np.int32)
        """Position at which the output of each slot begins."""
        self._rows = RowExpander(max_num_seqs)
        self._decode: Long = NO_INDICES
        """Slots of the decode batch. The next four fields are valid until the batch changes."""
        self._fallback: Long | None = None
        """Indices of the decode rows that the fused sampler never handles; None until they are
        computed."""
        self._parts: tuple[SampledRows[Array], ...] = ()
        self._scored_rows: Long = NO_INDICES
        """Indices of the decode rows for which log-probabilities are requested."""
        self._masked_steps = 0
        """Number of steps until all decode rows have passed their `min_tokens`."""
        self._continued = 0
        """Number of rows that followed the decode batch in the previous step."""

    def update(self, step: Step, masks: Int32 = NO_MASKS) -> Update:
        """Apply a step to the batch and return its layout. `masks`, int32 (rows, words), are the
        token masks of the step's constrained rows. Steps must be applied in order."""
        rows = self._rows.expand(step.rows, step.leaves)
        pairs = self._admit(step.admissions) if len(step.admissions.slots) else []
        if len(step.table_slots):
            pairs.append((self._table_indices(step), step.table_blocks))
        layout = StepLayout.of(
            rows,
            step.token_ids,
            self._outputs,
            max_rows=0 if step.vision else len(self._outputs),  # only chunks read image features
            runs_from=self._traits.min_rows_for_runs,
        )
        continued, decodes = layout.continued, len(rows.decode_slots)
        if len(resized := layout.resized):
            slots = rows.others.slots[resized].astype(np.int64)
            pairs.append((self.layout.lengths + slots, layout.lengths[resized]))
            pairs.append((self.layout.frozen + slots, np.zeros(len(slots), np.int64)))
        if rows.decode_slots is not self._decode or len(continued.slots) or self._continued:
            pairs += self._change_rows(rows.decode_slots, continued)
        slots, positions, numbers = layout.samplers
        fallback = self._fallback_rows(layout, slots, positions)
        scored, results = self._scored(step.token_ids, layout, slots, numbers)
        return Update(
            step.step,
            Inputs(
                changes=_concatenated(pairs),
                prefill=self._prefill(step.token_ids, layout) if len(layout.chunks) else None,
                fallback=fallback,
                copies=_copies(step.copies),
                slot_copies=_copies(step.slot_copies),
                admitted=self._admitted(step),
                kept=_kept(layout),
                choices=self._choices(len(slots) - len(layout.choices), slots, positions, masks),
                scored=scored,
            ),
            positions,
            decodes,
            lengths=self._host_seq_lens(layout),
            continued=len(continued.slots),
            resumed=len(continued.resumed),
            order=np.argsort(numbers) if len(numbers) > decodes else None,
            counts=rows.counts,
            scored=results,
            pooled=self._pooled(layout) if len(layout.pooled) else None,
        )

    def _admit(self, new: Admissions) -> list[_Changes]:
        """Record new sequences, and return the resulting changes to the state array."""
        self.sampling.admit(new)
        self._scores.admit(new.slots, new.prompt_lengths, new.scores)
        self._outputs[new.slots] = new.prompt_lengths
        columns = np.arange(self.layout.rope_deltas, self.layout.rows, self.layout.slots)
        rows = new.rope_deltas[:, None], new.prompt_lengths[:, None], new.freeze_ids, new.sampling
        return [((columns + new.slots[:, None]).ravel(), np.concatenate(rows, axis=1).ravel())]

    def _table_indices(self, step: Step) -> Int64:
        firsts = step.table_slots.astype(np.int64) * self.layout.max_blocks + step.table_starts
        if len(firsts) == len(step.table_blocks):  # each table grows by one block
            return firsts
        return concatenate_ranges(firsts, step.table_counts.astype(np.int64))

    def _change_rows(self, decode: Long, continued: Continued) -> list[_Changes]:
        """Return the changes to the list of decode rows: the decode batch, followed by the rows in
        `continued`."""
        old_end, first = len(self._decode) + self._continued, len(self._decode)
        if decode is not self._decode:
            self._decode, self._fallback, first = decode, None, 0
        decodes, end = len(decode), len(decode) + len(continued.slots)
        rows = np.full(max(old_end, end), self.layout.dummy, np.int64)
        rows[:decodes], rows[decodes:end] = decode, continued.slots
        places, layout = np.arange(first, len(rows)), self.layout
        pairs: list[_Changes] = [(layout.rows + places, rows[first:])]
        if len(continued.slots) or self._continued:
            positions = np.full(len(rows), -1, np.int64)
            positions[decodes:end] = continued.positions
            pairs.append((layout.row_positions + places, positions[first:]))
            indices = np.arange(decodes, end)
            pairs.append((layout.row_token_ids + indices, continued.token_ids.astype(np.int64)))
        self._continued = len(continued.slots)
        return pairs

    def _prefill(self, token_ids: Int32, layout: StepLayout) -> Prefill[Array]:
        rows = layout.rows.others.take(layout.chunks)
        counts, contexts = rows.counts, rows.starts + rows.counts
        ends_at = counts.cumsum()
        firsts = (ends_at - counts).astype(np.int32)
        row_of = np.arange(len(counts)).repeat(counts)
        per_program = self._traits.tokens_per_program
        groups = -(-counts // per_program)
        tile_rows = np.arange(len(groups), dtype=np.int32).repeat(groups)
        tile_numbers = concatenate_ranges(np.zeros(len(groups), np.int64), groups)
        # Tiles with the longest context come first, so that the device does not have to wait for
        # them at the end.
        ends_in_row = np.minimum(counts[tile_rows], (tile_numbers + 1) * per_program)
        longest_first = np.argsort(-(rows.starts[tile_rows] + ends_in_row), kind="stable")
        ends = layout.chunks.searchsorted(layout.ends)
        if len(token_ids) == ends_at[-1]:
            own_ids = token_ids.copy()  # the copy outlives the message
        else:  # some ids belong to other rows or are successors to score
            own_ids = token_ids[concatenate_ranges(layout.firsts[layout.chunks], counts)]
        return Prefill(
            own_ids,
            positions=concatenate_ranges(rows.starts, counts).astype(np.int32),
            slots=rows.slots[row_of],
            rows=np.stack((rows.slots, firsts, counts, contexts)).astype(np.int32),
            tiles=np.stack((tile_rows, tile_numbers))[:, longest_first].astype(np.int32),
            ends=self._read_tokens(firsts, counts, ends, len(layout.pooled)),
            sampling=layout.rows.others.slots[layout.sampled],
        )

    def _read_tokens(self, firsts: Int32, counts: Int32, ends: Long, pooled: int) -> Int32:
        """Return, for each chunk in `ends`, the index of the token whose hidden state is read. The
        last `pooled` of these chunks are pooling rows."""
        read: Int32 = (firsts + counts - 1)[ends].astype(np.int32)
        if pooled and self._pooling == "cls":
            read[-pooled:] = firsts[ends[-pooled:]]
        return read

    def _pooled(self, layout: StepLayout) -> PooledRows:
        """Return the pooling rows of a step."""
        numbers = (layout.pooled + len(layout.rows.decode_slots)).astype(np.int32)
        if self._pooling != "mean":
            return PooledRows(numbers, (), ())
        counts = layout.rows.others.counts[layout.chunks]
        firsts, chunks = counts.cumsum() - counts, layout.chunks.searchsorted(layout.pooled)
        return PooledRows(numbers, tuple(map(int, firsts[chunks])), tuple(map(int, counts[chunks])))

    def _host_seq_lens(self, layout: StepLayout) -> HostSeqLens:
        if not self._traits.needs_host_seq_lens:
            return NO_SEQ_LENS
        counts = layout.rows.others.counts[layout.chunks].tolist()
        contexts = layout.lengths[layout.chunks].tolist()
        decodes = np.concatenate((layout.rows.decode_starts, layout.continued.positions)) + 1
        return HostSeqLens(counts, contexts, decodes.tolist())

    def _admitted(self, step: Step) -> Long | None:
        """Return the slots of new sequences, for which layers must reset their state; None if there
        are none."""
        slots = step.admissions.slots
        return slots.astype(np.int64) if self._traits.has_slot_state and len(slots) else None

    # -- sampling -------------------------------------------------------------------------

    def _fallback_rows(
        self, layout: StepLayout, slots: Long, positions: Long
    ) -> tuple[SampledRows[Array], ...]:
        """Return the rows that must be sampled without the fused sampler
        (`BatchOperators.sample_rows`), except choices under grammar masks. `slots` and `positions`
        describe all rows that choose a token."""
        first, decodes = len(layout.sampled), len(layout.rows.decode_slots)
        last = len(slots) - len(layout.choices)
        at = slice(first, first + decodes)
        rows, any_masked = self._fallback_decodes(slots[at], positions[at])
        if last == decodes and not any_masked:
            parts = self._parts
        else:
            not_fused = self._not_fused(slots[:last], positions[:last])
            not_fused[at] = False
            not_fused[rows + first] = True
            rows = np.flatnonzero(not_fused)
            parts = self._sampled_parts(slots, rows)
            parts = tuple(self.sampling.masked(part, positions[part.index]) for part in parts)
        return tuple(_with_longest(part, positions[part.index]) for part in parts)

    def _choices(
        self, first: int, slots: Long, positions: Long, masks: Int32
    ) -> tuple[SampledRows[Array], ...]:
        """Return the rows from index `first` on, in parts of a few rows each. These rows choose
        under grammar masks, from the hidden states kept in their slots."""
        max_rows, parts = self._traits.fallback_at_once, []
        for at in range(first, len(slots), max_rows):
            part, part_positions = slots[at : at + max_rows], positions[at : at + max_rows]
            rows = self.sampling.masked(self.sampling.rows(part, part), part_positions)
            part_masks = masks[at - first : at - first + max_rows]
            fused = not self._not_fused(part, part_positions).any()
            parts.append(
                _with_longest(
                    dataclasses.replace(rows, masks=part_masks, fused=fused), part_positions
                )
            )
        return tuple(parts)

    def _not_fused(self, slots: Long, positions: Long) -> NDArray[np.bool_]:
        """Return, for each row, True if the fused sampler cannot sample the token at its
        position."""
        never = self.sampling.never_fused(slots, self._traits.fused_sampling)
        return never | self.sampling.masking(slots, positions)

    def _sampled_parts(self, slots: Long, rows: Long) -> tuple[SampledRows[Array], ...]:
        """Return the rows with the indices `rows` and their sampling parameters, in parts of a few
        rows each."""
        max_rows = self._traits.fallback_at_once
        parts = (rows[at : at + max_rows] for at in range(0, len(rows), max_rows))
        return tuple(self.sampling.rows(slots[part], part) for part in parts)

    def _fallback_decodes(self, decode: Long, positions: Long) -> tuple[Long, bool]:
        """Return the indices of the decode rows that the fused sampler does not handle in this
        step. The bool is True if `min_tokens` still forbids ids for any of the decode rows."""
        if self._fallback is None:
            never = self.sampling.never_fused(decode, self._traits.fused_sampling)
            self._fallback = np.flatnonzero(never)
            self._scored_rows = self._scores.requesting(decode)
            self._parts = self._sampled_parts(decode, self._fallback)
            self._masked_steps = self.sampling.masked_steps(decode, positions)
        if self._masked_steps <= 0:
            return self._fallback, False
        self._masked_steps -= 1
        masking = self.sampling.masking(decode, positions)
        masking[self._fallback] = True
        return np.flatnonzero(masking), True

    def _scored(
        self, token_ids: Int32, layout: StepLayout, slots: Long, numbers: Long
    ) -> tuple[ScoredRows[Array] | None, ScoredResults | None]:
        """Return the tokens whose log-probabilities the step computes, and the layout of the
        results on the host; None for both if there are none. `slots` and `numbers` are the slots
        and row indices of all rows that choose a token. Call after `_fallback_rows`, which updates
        `_scored_rows`."""
        asking, first = self._scored_rows, len(layout.sampled)
        if len(slots) > len(layout.rows.decode_slots):
            after_decodes = first + len(layout.rows.decode_slots)
            parts = (
                self._scores.requesting(slots[:first]),
                self._scores.requesting(slots[after_decodes:]),
            )
            asking = np.concatenate((parts[0], asking + first, parts[1] + after_decodes))
        prompts, targets, counts = self._scores.prompts(token_ids, layout)
        if not len(asking) and not len(prompts):
            return None, None
        counts = np.concatenate((counts, self._scores.output[slots[asking]]))
        rows = numbers[asking].astype(np.int32)
        return ScoredRows(prompts, targets, asking), ScoredResults(rows, counts)


def _copies(copies: Copies | None) -> tuple[Array, ...]:
    if copies is None:
        return ()
    return copies.sources.astype(np.int64), copies.targets.astype(np.int64)


def _kept(layout: StepLayout) -> KeptRows[Array] | None:
    """Return the slots in which hidden states are kept for a later step; None if there are none."""
    if not len(layout.kept) and not len(layout.continued.kept):
        return None
    return KeptRows(layout.rows.others.slots[layout.kept].astype(np.int64), layout.continued.kept)


def _with_longest(part: SampledRows[Array], positions: Long) -> SampledRows[Array]:
    """Return the rows with `LogitRules.longest` set to the length of the longest sequence with a
    penalty."""
    if part.rules is None or not len(part.rules.penalized):
        return part
    longest = int(positions[part.rules.penalized].max())
    return dataclasses.replace(part, rules=dataclasses.replace(part.rules, longest=longest))


def _concatenated(pairs: list[_Changes]) -> tuple[Array, ...]:
    if not pairs:
        return ()
    indices = np.concatenate([pair[0] for pair in pairs]).astype(np.int64)
    return indices, np.concatenate([pair[1] for pair in pairs]).astype(np.int32)
