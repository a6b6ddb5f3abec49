"""The state that mixers keep for sequences between steps: its specification, allocation and
updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from nanoactor.models.batch import KVCache

Zeros = Callable[..., torch.Tensor]
"""`Runtime.zeros` of a device, which allocates a zeroed tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedKV:
    """Specification of the keys and values of one layer, which are stored in the sequences' blocks.

    All layers share the block tables, so a block's size in bytes is the sum over all layers.
    """

    kv_heads: int
    """Number of key-value heads on this rank."""
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes that one token takes in one layer on this rank."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes per sequence outside the blocks: always 0."""
        return 0

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> KVCache:
        """Allocate the cache of one layer, zeroed because padded reads must find finite numbers.
        `slots` is ignored."""
        shape = blocks, block_size, self.kv_heads, self.head_dim
        return KVCache(zeros(*shape, dtype=self.dtype), zeros(*shape, dtype=self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotArray:
    """Specification of one array that is kept for each sequence."""

    shape: tuple[int, ...]
    """Shape of the array of one sequence, on this rank."""
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SlotState:
    """Specification of arrays that a layer keeps for each sequence, regardless of the sequence's
    length.

    A slot is the index of a sequence's arrays. They are zeroed when a sequence starts to use the
    slot, and copied when a sequence is forked. Layers do not change the arrays of a slot that is
    marked in `AttentionBatch.frozen`.
    """

    arrays: tuple[SlotArray, ...]

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes per token: always 0, because this state is not stored in blocks."""
        return 0

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes that the arrays of one sequence take in one layer on this rank."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in self.arrays)

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> SlotArrays:
        """Allocate zeroed arrays for `slots` sequences, including a dummy sequence for padding
        rows."""
        arrays = (zeros(slots, *array.shape, dtype=array.dtype) for array in self.arrays)
        return SlotArrays(tuple(arrays))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotArrays:
    """Arrays that one layer keeps for each sequence, (slots, ...) each. A slot is a sequence's
    index."""

    arrays: tuple[torch.Tensor, ...]

    def zero(self, slots: torch.Tensor) -> None:
        """Set the arrays of `slots` (sequence indices), int64, to zero."""
        for array in self.arrays:
            array.index_fill_(0, slots, 0)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy arrays from the slots (sequence indices) `sources` to `targets`, int64 of equal
        length.

        All sources are read before any target is written, so two slots may be swapped.
        """
        for array in self.arrays:
            array.index_copy_(0, targets, array.index_select(0, sources))


StateSpec = PagedKV | SlotState
LayerState = KVCache | SlotArrays


def paged_caches(states: Sequence[LayerState]) -> list[KVCache] | None:
    """Return the KV caches of all layers, or None if some layer keeps another kind of state."""
    caches = [state for state in states if isinstance(state, KVCache)]
    return caches if len(caches) == len(states) else None
