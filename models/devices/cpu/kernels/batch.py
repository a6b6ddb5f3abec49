"""Kernels that compute the inputs of a step's rows from tables that are indexed by slot (a
sequence's index)."""

from __future__ import annotations

import torch

from nanoactor.models.batch import DecodeRows, RowBuffers, SlotTables
from nanoactor.models.devices.cpu.kernels.elements import FLOAT32, INT32, INT64, kernel, view


@kernel("aaaaaaaaaaaaaannnnnn")
def _advance(
    tables, lengths, last_tokens, deltas, frozen_slots, freeze_ids, row_slots, row_positions,
    row_ids, token_ids, positions, slot_mapping, contexts, id_cache, count, slots, width,
    block_size, num_freeze_ids, cache_size, like
):  # fmt: skip
    """Compute the inputs of `count` decode rows, and store each row's token at its cache position
    in `id_cache`.

    The last slot is for padding rows, and its length stays 0. If the address `deltas` is null,
    rotary positions equal positions in the sequence.
    """
    frozen = view(frozen_slots, (slots,), INT32)
    freezing_ids = view(freeze_ids, (num_freeze_ids, slots), INT32)
    blocks, slot_lengths = view(tables, (slots, width), INT32), view(lengths, (slots,), INT32)
    newest_tokens, rope_offsets = view(last_tokens, (slots,), INT32), view(deltas, (slots,), INT32)
    slots_by_row, out_ids = view(row_slots, (count,), INT32), view(token_ids, (count,), INT32)
    given_positions, given_ids = (
        view(row_positions, (count,), INT32),
        view(row_ids, (count,), INT32),
    )
    rope_positions, cache_positions = (
        view(positions, (count,), INT32),
        view(slot_mapping, (count,), INT64),
    )
    context_lengths, cached_ids = (
        view(contexts, (count,), INT32),
        view(id_cache, (cache_size,), INT32),
    )
    for row in range(count):
        slot = slots_by_row[row]
        continues = given_positions[row] < 0
        position = slot_lengths[slot] if continues else given_positions[row]
        token = newest_tokens[slot] if continues else given_ids[row]
        out_ids[row] = token
        rope_positions[row] = position + rope_offsets[slot] if deltas else position
        context_lengths[row] = position + 1
        if continues:
            for index in range(num_freeze_ids):
                if freezing_ids[index, slot] == token:
                    frozen[slot] = 1
        if continues and frozen[slot]:
            cache_position = blocks[slots - 1, 0] * block_size
        else:
            cache_position = (
                blocks[slot, position // block_size] * block_size + position % block_size
            )
            if continues and slot < slots - 1:
                slot_lengths[slot] = position + 1
        cache_positions[row] = cache_position
        cached_ids[cache_position] = token


@kernel("aaaannnn")
def _fill_slot_mapping(
    tables, slot_of, positions, slot_mapping, count, slots, width, block_size, like
):
    """Compute the cache positions of tokens from their slots and their positions in the
    sequence."""
    blocks, slots_by_token = view(tables, (slots, width), INT32), view(slot_of, (count,), INT32)
    token_positions, cache_positions = (
        view(positions, (count,), INT32),
        view(slot_mapping, (count,), INT64),
    )
    for i in range(count):
        block = blocks[slots_by_token[i], token_positions[i] // block_size]
        cache_positions[i] = block * block_size + token_positions[i] % block_size


def advance(tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor) -> None:
    """Compute the inputs of decode rows, as specified by `BatchOperators.advance`."""
    deltas = tables.rope_deltas
    _advance(
        tables.blocks.data_ptr(),
        tables.lengths.data_ptr(),
        tables.last_tokens.data_ptr(),
        0 if deltas is None else deltas.data_ptr(),
        tables.frozen.data_ptr(),
        tables.freeze_ids.data_ptr(),
        *(column.data_ptr() for column in rows),
        buffers.token_ids.data_ptr(),
        buffers.positions.data_ptr(),
        buffers.slot_mapping.data_ptr(),
        buffers.contexts.data_ptr(),
        ids.data_ptr(),
        rows.slots.numel(),
        *tables.blocks.shape,
        tables.block_size,
        len(tables.freeze_ids),
        ids.numel(),
        FLOAT32,
    )


def fill_slot_mapping(
    tables: SlotTables, slots: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Fill `slot_mapping`, int64 (tokens,), with each token's position in the cache (block *
    block_size + offset).

    `slots` and `positions`, int32 (tokens,), are the token's slot (a sequence's index) and its
    position in the sequence.
    """
    addresses = (x.data_ptr() for x in (tables.blocks, slots, positions, slot_mapping))
    _fill_slot_mapping(*addresses, slots.numel(), *tables.blocks.shape, tables.block_size, FLOAT32)
