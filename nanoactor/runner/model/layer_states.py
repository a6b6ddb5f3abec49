"""Per-sequence state of all layers: its memory and its copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.layers.state import LayerState, StateSpec
from nanoactor.models.sampling.logit_rules import TokenIds

_ID_BYTES = 4
"""Token ids are stored alongside keys and values."""


def block_bytes(states: Sequence[StateSpec], block_size: int) -> int:
    """Return the size of a block in bytes: its states in all layers and the ids of its tokens."""
    each = sum(state.bytes_per_token for state in states) + _ID_BYTES
    return each * block_size


def slot_bytes(states: Sequence[StateSpec]) -> int:
    """Return the bytes that all layers keep of one sequence, whatever its length."""
    return sum(state.bytes_per_slot for state in states)


def copy_blocks(
    states: Sequence[LayerState], tokens: TokenIds, sources: torch.Tensor, copies: torch.Tensor
) -> None:
    """Copy blocks, int64, in all layers, with the ids of their tokens."""
    ids = tokens.ids.view(-1, tokens.tables.block_size)
    caches = [state for state in states if isinstance(state, KVCache)]
    parts = [part for cache in caches for part in (cache.keys, cache.values)]
    for part in (*parts, ids):
        part.index_copy_(0, copies, part.index_select(0, sources))
