"""Positions of a step's tokens, computed from tables that are indexed by slot."""

from __future__ import annotations

import torch

from nanoactor.models.batch import DecodeRows, RowBuffers, SlotTables
from nanoactor.models.devices.cpu.kernels.elements import FLOAT, INT32, INT64, kernel, view


@kernel("aaaaaaaaaaaaaannnnnn")
def _advance(
    tables, lengths, last_tokens, deltas, frozen_slots, freeze_ids, row_slots, row_positions,
    row_ids, token_ids, positions, slot_mapping, contexts, written, count, slots, width,
    block_size, watched, room, like
):  # fmt: skip
    """Fill in the step's buffers for each of `count` rows, and store each row's token at its cache
    position in `written`. The last slot is a dummy of length 0. A null address for `deltas` means
    that there are none."""
    frozen = view(frozen_slots, (slots,), INT32)
    watching = view(freeze_ids, (watched, slots), INT32)
    blocks, known = view(tables, (slots, width), INT32), view(lengths, (slots,), INT32)
    last, turned = view(last_tokens, (slots,), INT32), view(deltas, (slots,), INT32)
    slot_of, ids = view(row_slots, (count,), INT32), view(token_ids, (count,), INT32)
    own_at, own_ids = view(row_positions, (count,), INT32), view(row_ids, (count,), INT32)
    rotary, places = view(positions, (count,), INT32), view(slot_mapping, (count,), INT64)
    ends, noted = view(contexts, (count,), INT32), view(written, (room,), INT32)
    for row in range(count):
        slot = slot_of[row]
        follows = own_at[row] < 0
        position = known[slot] if follows else own_at[row]
        token = last[slot] if follows else own_ids[row]
        ids[row] = token
        rotary[row] = position + turned[slot] if deltas else position
        ends[row] = position + 1
        if follows:
            for number in range(watched):
                if watching[number, slot] == token:
                    frozen[slot] = 1
        if follows and frozen[slot]:
            place = blocks[slots - 1, 0] * block_size
        else:
            place = blocks[slot, position // block_size] * block_size + position % block_size
            if follows and slot < slots - 1:
                known[slot] = position + 1
        places[row] = place
        noted[place] = token


@kernel("aaaannnn")
def _locate(tables, slot_of, positions, slot_mapping, count, slots, width, block_size, like):
    """Compute the cache positions of tokens from their slots and their positions in the
    sequence."""
    blocks, slot = view(tables, (slots, width), INT32), view(slot_of, (count,), INT32)
    at, places = view(positions, (count,), INT32), view(slot_mapping, (count,), INT64)
    for i in range(count):
        block = blocks[slot[i], at[i] // block_size]
        places[i] = block * block_size + at[i] % block_size


def advance(tables: SlotTables, rows: DecodeRows, into: RowBuffers, ids: torch.Tensor) -> None:
    """Implement `BatchOperators.advance`."""
    deltas = tables.rope_deltas
    _advance(
        tables.blocks.data_ptr(),
        tables.lengths.data_ptr(),
        tables.last_tokens.data_ptr(),
        0 if deltas is None else deltas.data_ptr(),
        tables.frozen.data_ptr(),
        tables.freeze_ids.data_ptr(),
        *(column.data_ptr() for column in rows),
        into.token_ids.data_ptr(),
        into.positions.data_ptr(),
        into.slot_mapping.data_ptr(),
        into.contexts.data_ptr(),
        ids.data_ptr(),
        rows.slots.numel(),
        *tables.blocks.shape,
        tables.block_size,
        len(tables.freeze_ids),
        ids.numel(),
        FLOAT,
    )


def locate(
    tables: SlotTables, slots: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Compute cache positions, int64 (tokens,), from slots and positions in the sequence, int32
    (tokens,)."""
    at = (x.data_ptr() for x in (tables.blocks, slots, positions, slot_mapping))
    _locate(*at, slots.numel(), *tables.blocks.shape, tables.block_size, FLOAT)
