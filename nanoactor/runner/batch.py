"""The running batch as the runner's host sees it: what the deltas of all steps add up to."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.messages import Step
from nanoactor.runner.sampling_table import NO_ROWS, Long, SampledRows, SamplingTable


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A prefill row: where its tokens lie in the step, and the blocks of its context."""

    first: int
    tokens: int
    context: int
    blocks: Long


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """A step, ready to run: arrays of its own, so that the batch may move on meanwhile."""

    step: int
    token_ids: Long
    """(tokens,): the decode rows' are filled in on the device."""
    positions: Long
    slot_mapping: Long
    prefills: tuple[Row, ...]
    decode_slots: Long
    decode_tables: Long
    decode_contexts: Long
    sampled: SampledRows


class BatchState:
    """Block tables, lengths and sampling parameters by slot."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int64)
        self._lengths = np.zeros(max_num_seqs, np.int64)
        self._decoding = np.zeros(max_num_seqs, np.bool_)
        self._decode = NO_ROWS
        """The slots of the decode set."""
        self._decode_rows: SampledRows | None = None
        """How these sample, until the set or a parameter changes."""
        self._sampling = SamplingTable(max_num_seqs)

    def prepare(self, step: Step) -> StepInputs:
        """Apply a step's deltas and lay out its inputs. Steps must come in order."""
        self._apply(step)
        return self._mixed_step(step) if len(step.slots) else self._decode_step(step)

    def _apply(self, step: Step) -> None:
        if len(step.admissions.slots):
            self._sampling.admit(step.admissions)
            self._decode_rows = None
        self._update_tables(step)
        if len(step.leaves) or len(step.joins):
            self._decoding[step.leaves] = False
            self._decoding[step.joins] = True
            self._decode, self._decode_rows = np.flatnonzero(self._decoding), None

    def _decode_step(self, step: Step) -> StepInputs:
        """The same as a mixed step without prefill rows; most steps are such."""
        decode = self._decode
        positions = self._lengths[decode]
        lengths = self._lengths[decode] = positions + 1
        places, offsets = np.divmod(positions, self._block_size)
        return StepInputs(
            step.step,
            np.zeros(len(decode), np.int64),
            positions,
            self._tables[decode, places] * self._block_size + offsets,
            (),
            decode,
            self._tables[decode, : self._blocks_of(lengths.max(initial=0))],
            lengths,
            self._sampled_decodes(lengths),
        )

    def _sampled_decodes(self, positions: Long) -> SampledRows:
        decode = self._decode
        if self._decode_rows is None:
            self._decode_rows = self._sampled_rows(decode, np.arange(len(decode)))
        rows = self._decode_rows
        return SampledRows(
            rows.slots,
            rows.token_index,
            positions,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seeds,
            rows.greedy,
            rows.plain,
            rows.limited,
            rows.unlimited,
            rows.nucleus,
            *self._sampling.masked_logits(decode, positions),
        )

    def _mixed_step(self, step: Step) -> StepInputs:
        decode = self._decode
        starts, counts = step.starts.astype(np.int64), step.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        # Positions within the step's prefill tokens, minus where the row began, plus its start.
        row_of = np.repeat(np.arange(len(counts)), counts)
        prefill_positions = np.arange(len(row_of)) - firsts[row_of] + starts[row_of]
        slots = np.concatenate([step.slots.astype(np.int64)[row_of], decode])
        positions = np.concatenate([prefill_positions, self._lengths[decode]])
        blocks = self._tables[slots, positions // self._block_size]
        self._lengths[step.slots] = starts + counts
        self._lengths[decode] += 1
        token_ids = np.zeros(len(positions), np.int64)
        token_ids[: len(step.token_ids)] = step.token_ids
        ends = (firsts + counts - 1)[step.samples]
        prefill_tokens = len(step.token_ids)
        return StepInputs(
            step.step,
            token_ids,
            positions,
            blocks * self._block_size + positions % self._block_size,
            self._prefill_rows(step, firsts),
            decode,
            self._tables[decode, : self._blocks_of(self._lengths[decode].max(initial=0))],
            self._lengths[decode],
            self._sampled_rows(
                np.concatenate([step.slots[step.samples].astype(np.int64), decode]),
                np.concatenate([ends, np.arange(len(decode)) + prefill_tokens]),
            ),
        )

    def _blocks_of(self, tokens: int) -> int:
        return -(-int(tokens) // self._block_size)

    def _update_tables(self, step: Step) -> None:
        at = 0
        changes = (step.table_slots, step.table_starts, step.table_counts)
        for slot, start, count in zip(*(array.tolist() for array in changes), strict=True):
            self._tables[slot, start : start + count] = step.table_blocks[at : at + count]
            at += count

    def _prefill_rows(self, step: Step, firsts: Long) -> tuple[Row, ...]:
        rows = []
        for slot, first, count in zip(
            step.slots.tolist(), firsts.tolist(), step.counts.tolist(), strict=True
        ):
            context = int(self._lengths[slot])
            blocks = self._tables[slot, : self._blocks_of(context)].copy()
            rows.append(Row(first, count, context, blocks))
        return tuple(rows)

    def _sampled_rows(self, slots: Long, token_index: Long) -> SampledRows:
        return self._sampling.rows(slots, token_index, self._lengths[slots])
