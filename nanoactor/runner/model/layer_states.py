"""The state that layers keep for sequences: its size in bytes, and copies of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.layers.state import LayerState, StateSpec
from nanoactor.models.sampling.logit_rules import TokenIds

_ID_BYTES = 4
"""Size of a token id in bytes. Ids are stored for each position in addition to keys and values."""


def block_bytes(states: Sequence[StateSpec], block_size: int) -> int:
    """Return the size of a block in bytes: the per-token states of `block_size` tokens in all
    layers, and their token ids."""
    each = sum(state.bytes_per_token for state in states) + _ID_BYTES
    return each * block_size


def slot_bytes(states: Sequence[StateSpec]) -> int:
    """Return the size in bytes of the state that all layers keep, outside of blocks, for one slot
    (a sequence's index in the batch)."""
    return sum(state.bytes_per_slot for state in states)


def copy_blocks(
    states: Sequence[LayerState], tokens: TokenIds, sources: torch.Tensor, copies: torch.Tensor
) -> None:
    """Copy blocks `sources` to blocks `copies`, both int64 (blocks,), in all layers, with their
    token ids."""
    ids = tokens.ids.view(-1, tokens.tables.block_size)
    caches = [state for state in states if isinstance(state, KVCache)]
    parts = [part for cache in caches for part in (cache.keys, cache.values)]
    for part in (*parts, ids):
        part.index_copy_(0, copies, part.index_select(0, sources))
