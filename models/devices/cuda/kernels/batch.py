"""Kernels that compute the inputs of a step's tokens from tables on the device. The tables are
indexed by slot (a sequence's index)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import DecodeRows, RowBuffers, SlotTables


def advance(tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor) -> None:
    """Compute the inputs of decode rows in one kernel, as specified by `BatchOperators.advance`."""
    if count := len(rows.slots):
        _advance[(triton.cdiv(count, 128),)](
            tables.blocks,
            tables.lengths,
            tables.last_tokens,
            tables.lengths if tables.rope_deltas is None else tables.rope_deltas,
            tables.frozen,
            tables.freeze_ids,
            *rows,
            buffers.token_ids,
            buffers.positions,
            buffers.slot_mapping,
            buffers.contexts,
            ids,
            count,
            len(tables.lengths) - 1,
            tables.blocks.stride(0),
            block_size=tables.block_size,
            has_rope_deltas=tables.rope_deltas is not None,
            num_freeze_ids=len(tables.freeze_ids),
            width=128,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=[
        "slots",
        "given_positions",
        "given_token_ids",
        "token_ids",
        "positions",
        "slot_mapping",
        "contexts",
    ],
)
def _advance(
    blocks,
    lengths,
    last_tokens,
    rope_deltas,
    frozen_slots,
    freeze_ids,
    slots,
    given_positions,
    given_token_ids,
    token_ids,
    positions,
    slot_mapping,
    contexts,
    ids,
    count,
    dummy,
    stride,
    block_size: tl.constexpr,
    has_rope_deltas: tl.constexpr,
    num_freeze_ids: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0) * width + tl.arange(0, width)
    mask = row < count
    slot = tl.load(slots + row, mask=mask, other=0)
    given = tl.load(given_positions + row, mask=mask, other=-1)
    continues = mask & (given < 0)
    length = tl.where(continues, tl.load(lengths + slot, mask=continues, other=0), given)
    given = tl.load(given_token_ids + row, mask=mask, other=0)
    token = tl.where(continues, tl.load(last_tokens + slot, mask=continues, other=0), given)
    tl.store(token_ids + row, token, mask=mask)
    rope_position = length
    if has_rope_deltas:
        rope_position += tl.load(rope_deltas + slot, mask=mask, other=0)
    tl.store(positions + row, rope_position, mask=mask)
    tl.store(contexts + row, length + 1, mask=mask)
    frozen = tl.load(frozen_slots + slot, mask=continues, other=0) > 0
    for index in tl.static_range(num_freeze_ids):
        freeze_id = tl.load(freeze_ids + index * (dummy + 1) + slot, mask=continues, other=-1)
        frozen |= continues & (freeze_id == token)
    tl.store(frozen_slots + slot, 1, mask=frozen)
    write_position = tl.where(frozen, 0, length)
    table_index = tl.where(frozen, dummy, slot).to(tl.int64) * stride + write_position // block_size
    block = tl.load(blocks + table_index, mask=mask, other=0).to(tl.int64)
    cache_position = block * block_size + write_position % block_size
    tl.store(slot_mapping + row, cache_position, mask=mask)
    tl.store(ids + cache_position, token, mask=mask)
    tl.store(lengths + slot, length + 1, mask=continues & (slot != dummy) & (frozen == 0))


def fill_slot_mapping(
    tables: SlotTables, slots: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Fill `slot_mapping`, int64 (tokens,), with each token's position in the cache (block *
    block_size + offset).

    `slots` and `positions`, int32 (tokens,), are the token's slot (a sequence's index) and its
    position in the sequence.
    """
    tokens = len(slots)
    if tokens:
        _fill_slot_mapping[(triton.cdiv(tokens, 256),)](
            tables.blocks,
            slots,
            positions,
            slot_mapping,
            tokens,
            tables.blocks.stride(0),
            block_size=tables.block_size,
            width=256,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["slots", "positions", "slot_mapping"],
)
def _fill_slot_mapping(
    blocks,
    slots,
    positions,
    slot_mapping,
    tokens,
    stride,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    token = tl.program_id(0) * width + tl.arange(0, width)
    mask = token < tokens
    slot = tl.load(slots + token, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=mask, other=0)
    block = tl.load(blocks + slot * stride + position // block_size, mask=mask, other=0)
    cache_position = block.to(tl.int64) * block_size + position % block_size
    tl.store(slot_mapping + token, cache_position, mask=mask)
