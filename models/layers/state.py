"""State that mixers keep for each sequence between steps, and its allocation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from nanoactor.models.batch import KVCache

Zeros = Callable[..., torch.Tensor]
"""`Runtime.zeros` of a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedKV:
    """Spec of the keys and values of each position, which are stored in the sequence's blocks. All
    layers share a block table, so a block's size is the sum over all layers."""

    kv_heads: int
    """Number of KV heads on this rank."""
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Return the number of bytes for a token, in one layer on this rank."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Return 0: there is no slot state."""
        return 0

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> KVCache:
        """Allocate a zeroed cache: padded reads must see finite numbers from the start."""
        shape = blocks, block_size, self.kv_heads, self.head_dim
        return KVCache(zeros(*shape, dtype=self.dtype), zeros(*shape, dtype=self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotArray:
    """Spec of an array that is kept for each sequence."""

    shape: tuple[int, ...]
    """Shape for one sequence, on this rank."""
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SlotState:
    """Spec of arrays that are kept for each sequence, independent of its length.

    A slot's arrays are zeroed when a sequence is admitted, and copied when a sequence is copied.
    Layers do not change the arrays of frozen slots; see `AttentionBatch.frozen`.
    """

    arrays: tuple[SlotArray, ...]

    @property
    def bytes_per_token(self) -> int:
        """Return 0: there are no pages."""
        return 0

    @property
    def bytes_per_slot(self) -> int:
        """Return the number of bytes for a slot, in one layer on this rank."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in self.arrays)

    def allocate(self, zeros: Zeros, blocks: int, block_size: int, slots: int) -> SlotArrays:
        """Allocate zeroed arrays for `slots` slots, including the dummy slot for padded rows."""
        arrays = (zeros(slots, *array.shape, dtype=array.dtype) for array in self.arrays)
        return SlotArrays(tuple(arrays))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotArrays:
    """One layer's arrays, each (slots, ...)."""

    arrays: tuple[torch.Tensor, ...]

    def zero(self, slots: torch.Tensor) -> None:
        """Zero the arrays of `slots`, int64."""
        for array in self.arrays:
            array.index_fill_(0, slots, 0)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots, int64. All sources are read before any target is written, so two may swap."""
        for array in self.arrays:
            array.index_copy_(0, targets, array.index_select(0, sources))


StateSpec = PagedKV | SlotState
LayerState = KVCache | SlotArrays


def paged_caches(states: Sequence[LayerState]) -> list[KVCache] | None:
    """Return all layers' states if every layer keeps keys and values, else None."""
    caches = [state for state in states if isinstance(state, KVCache)]
    return caches if len(caches) == len(states) else None
