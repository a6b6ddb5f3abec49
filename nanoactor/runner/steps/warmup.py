"""Dummy steps of the largest sizes, which compile code and show how much memory steps need."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.messages.engine import Admissions, Int32, Step
from nanoactor.messages.rows import Rows, Want
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.sampling.columns import WORDS, pack
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens
from nanoactor.runner.batch.batch import BatchTraits
from nanoactor.runner.batch.inputs import Array, Inputs, SampledRows, Update
from nanoactor.runner.batch.sampling_table import SamplingTable

_NONE: Int32 = np.empty(0, np.int32)


def admissions(slots: Int32, **sampling: float) -> Admissions:
    """Return admissions of one sequence to each of these slots (indices in the batch), with the
    given sampling parameters. All other parameters are neutral."""
    rows = np.frombuffer(pack(sampling) * len(slots), np.int32).reshape(-1, WORDS)
    zeros = np.zeros(len(slots), np.int32)
    return Admissions(
        slots,
        slots.astype(np.int64),
        rows,
        unmasked_from=zeros,
        masked_ids=_NONE,
        masked_counts=zeros,
        freeze_ids=np.full((len(slots), MAX_FREEZE_IDS), -1, np.int32),
        rope_deltas=zeros,
        prompt_lengths=zeros,
        rule_rows=_NONE,
        rules=(),
    )


def prefill_step(tokens: int, rows: int, block_size: int) -> Step:
    """Return a step of `rows` prompts with `tokens` tokens in total. Each prompt samples one
    token."""
    counts = np.full(rows, tokens // rows, np.int32)
    counts[: tokens % rows] += 1
    slots = np.arange(rows, dtype=np.int32)
    # Each prompt has room for one more token, which a decode step may add.
    blocks = (counts // block_size + 1).astype(np.int32)
    return Step(
        1,
        rows=Rows(
            slots,
            np.zeros(rows, np.int32),
            counts,
            np.full(rows, Want.SAMPLE, np.uint8),
            sources=_NONE,
        ),
        leaves=_NONE,
        token_ids=np.zeros(tokens, np.int32),
        table_slots=slots,
        table_starts=np.zeros(rows, np.int32),
        table_counts=blocks,
        table_blocks=np.arange(int(blocks.sum()), dtype=np.int32),
        admissions=admissions(slots),
    )


def decode_update(
    rows: int, dummy: int, traits: BatchTraits, max_model_len: int, **sampling: float
) -> Update:
    """Return a decode step of `rows` rows, all in slot `dummy`, which is reserved for padding rows.
    If sampling parameters are given, all rows are sampled outside the fused sampler, and penalties
    cover `max_model_len` tokens."""
    table, slots = SamplingTable(rows), np.arange(rows)
    table.admit(admissions(slots.astype(np.int32), **sampling))
    fallback: list[SampledRows[Array]] = []
    if sampling or traits.fused_sampling == "none":
        for at in range(0, rows, traits.fallback_at_once):
            part = slots[at : at + traits.fallback_at_once]
            sampled = table.rows(part, part)
            rules = sampled.rules and dataclasses.replace(sampled.rules, longest=max_model_len)
            dummy_slots = np.full(len(part), dummy)
            fallback.append(dataclasses.replace(sampled, slots=dummy_slots, rules=rules))
    inputs: Inputs[Array] = Inputs((), None, tuple(fallback))
    return Update(0, inputs, slots, rows, HostSeqLens([], [], [1] * rows))


def mixed_update(prefill: Update, rows: int) -> Update:
    """Return the step `prefill` with `rows` decode rows in addition, all in the slot that is
    reserved for padding rows."""
    lengths = prefill.lengths
    if lengths is not NO_SEQ_LENS:
        lengths = dataclasses.replace(lengths, decode_contexts=[1] * rows)
    positions = np.concatenate((prefill.positions, np.zeros(rows, prefill.positions.dtype)))
    return dataclasses.replace(
        prefill, positions=positions, decodes=rows, lengths=lengths, order=None
    )


def longest_lengths(rows: int, blocks: int, block_size: int, max_length: int) -> HostSeqLens:
    """Return the maximum lengths of `rows` decode rows in a cache of `blocks` blocks. The first
    rows are as long as `max_length` allows while one block is left for each later row.

    Steps are captured with these lengths, so that the graphs can process any sequences that fit
    into the cache.
    """
    lengths, blocks_left = [], blocks
    for rows_after in range(rows - 1, -1, -1):
        own_blocks = max(1, min(-(-max_length // block_size), blocks_left - rows_after))
        lengths.append(min(max_length, own_blocks * block_size))
        blocks_left -= own_blocks
    return HostSeqLens([], [], lengths)
