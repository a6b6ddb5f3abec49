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
        """Always 0, because this state is stored in blocks only."""
        return 0

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> KVCache:
        """Allocate the cache of one layer. It is zeroed, because padded reads must find finite
        numbers."""
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

    A slot's arrays are zeroed when a sequence is admitted to it, and copied when a sequence is
    forked. Layers do not change the arrays of frozen slots (see `AttentionBatch.frozen`).
    """

    arrays: tuple[SlotArray, ...]

    @property
    def bytes_per_token(self) -> int:
        """Always 0, because this state is not stored in blocks."""
        return 0

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes that one slot takes in one layer on this rank."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in self.arrays)

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> SlotArrays:
        """Allocate zeroed arrays for `slots` slots, which include the dummy slot for padding
        rows."""
        arrays = (zeros(slots, *array.shape, dtype=array.dtype) for array in self.arrays)
        return SlotArrays(tuple(arrays))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotArrays:
    """Arrays that one layer keeps for each sequence, (slots, ...) each."""

    arrays: tuple[torch.Tensor, ...]

    def zero(self, slots: torch.Tensor) -> None:
        """Set the arrays of some slots to zero. `slots` is int64."""
        for array in self.arrays:
            array.index_fill_(0, slots, 0)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the arrays of slots to other slots; both arguments are int64 of equal length.

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
