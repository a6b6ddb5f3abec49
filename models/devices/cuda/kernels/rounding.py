"""Rounding of activations to e4m3 for operators with FP8 weights.

An operator rounds its own input unless the kernel that computes this input has already done so,
which saves a kernel and a pass over memory.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.protocols import Consumer
from nanoactor.models.weights.fp8 import E4M3

E4M3_MAX = 448.0
"""Largest finite e4m3 number."""
_MIN_ABSMAX = 1e-12
"""Lower limit of a block's largest absolute value, so that zeros stay zeros."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Activations in e4m3, or memory for them. A slot has room for one row, and may be empty."""

    values: torch.Tensor
    """e4m3 numbers, (slots, blocks * block) in Triton's operators. In those in CUDA C++, (blocks,
    slots, 128), whose 16-byte chunks are swizzled (chunk ^ slot % 8)."""
    scales: torch.Tensor
    """Scale of each row in each block of inputs, float32 (blocks, slots)."""

    @staticmethod
    def empty(blocks: int, block: int, slots: int, device: torch.device) -> Rows:
        """Return uninitialized memory for `slots` rows of `blocks` blocks."""
        shape = slots, blocks * block
        return Rows(torch.empty(shape, dtype=E4M3, device=device), _scales(blocks, slots, device))

    @staticmethod
    def empty_swizzled(blocks: int, slots: int, device: torch.device) -> Rows:
        """Return uninitialized memory for `slots` rows of `blocks` blocks of 128 inputs."""
        shape = blocks, slots, 128
        return Rows(torch.empty(shape, dtype=E4M3, device=device), _scales(blocks, slots, device))

    @property
    def is_swizzled(self) -> bool:
        """True if the operators in CUDA C++ read these rows."""
        return self.values.dim() == 3

    @property
    def block(self) -> int:
        """Number of inputs that share a scale."""
        return self.values.shape[-1] // (1 if self.is_swizzled else len(self.scales))


def _scales(blocks: int, slots: int, device: torch.device) -> torch.Tensor:
    return torch.empty(blocks, slots, dtype=torch.float32, device=device)


class RoundingOperator(abc.ABC):
    """An operator that rounds its input to e4m3, or takes the rounded rows of an earlier kernel."""

    _given: tuple[torch.Tensor, Rows] | None = None

    @abc.abstractmethod
    def memory_for(self, x: torch.Tensor) -> Rows | None:
        """Return memory for the rounded rows of `x`, (rows, inputs), or None if the operator would
        not read them."""

    def give(self, x: torch.Tensor, rows: Rows) -> None:
        """Store the rounded rows of `x`, with which the operator is called next. `x` must not be
        changed in between."""
        self._given = x, rows

    def take(self, x: torch.Tensor) -> Rows | None:
        """Return the rounded rows of `x`, or None if they were not given."""
        given, self._given = self._given, None
        # The tensor in `given` is alive, so no other one can have its address.
        if given is None or given[0].data_ptr() != x.data_ptr() or given[0].numel() != x.numel():
            return None
        return given[1]


def offer_rows(consumer: Consumer, x: torch.Tensor, block: int | None = None) -> Rows | None:
    """Return memory for the rounded rows of `x`, (rows, inputs), and announce it to `consumer`,
    which reads it when it is called with `x`. The caller must fill it first.

    Return None if `consumer` would not read it, or if `block` is not None and its blocks have
    another size.
    """
    if not isinstance(consumer, RoundingOperator):
        return None
    rows = consumer.memory_for(x)
    if rows is None or block not in (None, rows.block):
        return None
    consumer.give(x, rows)
    return rows


def rounding_arguments(rows: Rows | None, unused: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a kernel that calls `store_rounded` if `rows` is not None. `unused`
    is any tensor on the device."""
    if rows is None:
        return {
            "rounded": unused,
            "rounded_scales": unused,
            "rounded_slots": 1,
            "rounded_block": 1,
            "rounds": False,
            "swizzled": False,
        }
    return {
        "rounded": rows.values,
        "rounded_scales": rows.scales,
        "rounded_slots": rows.scales.shape[1],
        "rounded_block": rows.block,
        "rounds": True,
        "swizzled": rows.is_swizzled,
    }


@triton.jit
def quantize_blocks(
    values, max_value: tl.constexpr = E4M3_MAX, min_absmax: tl.constexpr = _MIN_ABSMAX
):
    """Return `values`, (blocks, block), rounded to e4m3, and the scale of each block."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), min_absmax) / max_value
    return (values / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def store_rounded(
    values,
    block_index,
    mask,
    slot,
    rounded,
    scales,
    slots,
    blocks: tl.constexpr,
    swizzled: tl.constexpr,
):
    """Round blocks of one row, float32 (count, block), and store them as `Rows` describes.

    `block_index`, (count,), contains their indices in the row, which has `blocks` blocks, and
    `slot` is the row's slot. Blocks that are not in `mask` are not stored.
    """
    count: tl.constexpr = values.shape[0]
    block: tl.constexpr = values.shape[1]
    values_e4m3, scale = quantize_blocks(values)
    tl.store(scales + block_index * slots + slot, scale, mask=mask)
    if swizzled:
        chunk = (tl.arange(0, block // 16) ^ (slot % 8).to(tl.int32)) * 16
        first = (block_index.to(tl.int64) * slots + slot) * block
        offsets = first[:, None, None] + chunk[None, :, None] + tl.arange(0, 16)[None, None, :]
        chunks = tl.reshape(values_e4m3, [count, block // 16, 16])
        tl.store(rounded + offsets, chunks, mask=mask[:, None, None])
    else:
        first = slot.to(tl.int64) * (blocks * block) + block_index * block
        offsets = first[:, None] + tl.arange(0, block)[None, :]
        tl.store(rounded + offsets, values_e4m3, mask=mask[:, None])
