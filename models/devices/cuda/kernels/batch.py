"""Positions of a step's tokens, computed from tables on the device that are indexed by slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import DecodeRows, RowBuffers, SlotTables


def advance(tables: SlotTables, rows: DecodeRows, into: RowBuffers, ids: torch.Tensor) -> None:
    """Implement `BatchOperators.advance`."""
    if count := len(rows.slots):
        _advance[(triton.cdiv(count, 128),)](
            tables.blocks,
            tables.lengths,
            tables.last_tokens,
            tables.lengths if tables.rope_deltas is None else tables.rope_deltas,
            tables.frozen,
            tables.freeze_ids,
            *rows,
            into.token_ids,
            into.positions,
            into.slot_mapping,
            into.contexts,
            ids,
            count,
            len(tables.lengths) - 1,
            tables.blocks.stride(0),
            block_size=tables.block_size,
            turns=tables.rope_deltas is not None,
            watched=len(tables.freeze_ids),
            width=128,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["count"])
def _advance(
    blocks,
    lengths,
    last_tokens,
    rope_deltas,
    all_frozen,
    freeze_ids,
    slots,
    own_positions,
    own_token_ids,
    token_ids,
    positions,
    slot_mapping,
    contexts,
    ids,
    count,
    dummy,
    stride,
    block_size: tl.constexpr,
    turns: tl.constexpr,
    watched: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0) * width + tl.arange(0, width)
    there = row < count
    slot = tl.load(slots + row, mask=there, other=0)
    own = tl.load(own_positions + row, mask=there, other=-1)
    follows = there & (own < 0)
    length = tl.where(follows, tl.load(lengths + slot, mask=follows, other=0), own)
    own = tl.load(own_token_ids + row, mask=there, other=0)
    token = tl.where(follows, tl.load(last_tokens + slot, mask=follows, other=0), own)
    tl.store(token_ids + row, token, mask=there)
    turned = length
    if turns:
        turned += tl.load(rope_deltas + slot, mask=there, other=0)
    tl.store(positions + row, turned, mask=there)
    tl.store(contexts + row, length + 1, mask=there)
    frozen = tl.load(all_frozen + slot, mask=follows, other=0) > 0
    for number in tl.static_range(watched):
        watched_id = tl.load(freeze_ids + number * (dummy + 1) + slot, mask=follows, other=-1)
        frozen |= follows & (watched_id == token)
    tl.store(all_frozen + slot, 1, mask=frozen)
    kept_at = tl.where(frozen, 0, length)
    at = tl.where(frozen, dummy, slot).to(tl.int64) * stride + kept_at // block_size
    block = tl.load(blocks + at, mask=there, other=0).to(tl.int64)
    place = block * block_size + kept_at % block_size
    tl.store(slot_mapping + row, place, mask=there)
    tl.store(ids + place, token, mask=there)
    tl.store(lengths + slot, length + 1, mask=follows & (slot != dummy) & (frozen == 0))


def locate(
    tables: SlotTables, slots: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Compute cache positions, int64 (tokens,), from slots and positions in the sequence, int32
    (tokens,)."""
    tokens = len(slots)
    if tokens:
        _locate[(triton.cdiv(tokens, 256),)](
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


@triton.jit(do_not_specialize=["tokens"])
def _locate(
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
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=there, other=0)
    block = tl.load(blocks + slot * stride + position // block_size, mask=there, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(slot_mapping + token, place, mask=there)
