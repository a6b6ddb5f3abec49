"""A mixture of experts for few tokens, in two Triton kernels. Each token-expert pair reads the
matrices of its expert.

Pairs that share an expert find its weights in the L2 cache. Packed matrices are unpacked as they
are read, and activations are rounded as the format specifies.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.fp8 import Packed
from nanoactor.models.devices.cuda.kernels.rounding import quantize_blocks
from nanoactor.models.weights.linear import DenseExperts

MAX_PAIRS, MAX_PACKED_PAIRS = 64, 16
"""Maximum numbers of token-expert pairs, for dense and for packed matrices. With more pairs,
grouped GEMMs are faster on an H200."""
_OUTPUTS, _PACKED_OUTPUTS = 4, 8
_MAX_INPUTS = 2048
"""Maximum number of inputs that a program reads at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """The matrices of one projection (gate and up, or down) of all experts, as the kernels read
    them."""

    weight: torch.Tensor
    """Weights, (experts, outputs, padded inputs)."""
    scales: torch.Tensor | None
    inputs: int
    group: int
    block: int
    offset: int

    @property
    def outputs_at_once(self) -> int:
        """Number of outputs that one program computes."""
        return _OUTPUTS if self.scales is None else _PACKED_OUTPUTS


@dataclasses.dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of all experts of a layer."""

    gate_up: Matrix
    down: Matrix


def dense_matrices(weights: DenseExperts) -> Matrices:
    """Return dense matrices in the form that the kernels read."""
    matrices = (
        Matrix(weight, None, weight.shape[-1], 1, weight.shape[-1], 0)
        for weight in (weights.gate_up, weights.down)
    )
    return Matrices(*matrices)


def packed_matrices(gate_up: Packed, down: Packed) -> Matrices:
    """Return FP8 matrices in the form that the kernels read."""
    inner, hidden = gate_up.weight.shape[1] // 2, down.weight.shape[1]
    return Matrices(
        *(
            Matrix(packed.weight, packed.scales, inputs, packed.group, packed.block, packed.offset)
            for packed, inputs in ((gate_up, hidden), (down, inner))
        )
    )


def run_experts(
    x: torch.Tensor, weights: Matrices, ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, (tokens, hidden)."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    inner, outputs = weights.down.inputs, weights.gate_up.outputs_at_once
    intermediate, y = x.new_empty(tokens * top_k, inner), torch.empty_like(x)
    _activate[(tokens * top_k, triton.cdiv(inner, outputs))](
        x,
        weights.gate_up.weight,
        weights.gate_up.scales,
        ids,
        intermediate,
        inner,
        top_k=top_k,
        **_sizes(weights.gate_up),
        **dependent_launch(),
    )
    _project_down[(tokens, triton.cdiv(hidden, outputs))](
        intermediate,
        weights.down.weight,
        weights.down.scales,
        ids,
        topk_weights,
        y,
        hidden,
        top_k=top_k,
        **_sizes(weights.down),
        **dependent_launch(),
    )
    return y


def _sizes(matrix: Matrix) -> dict[str, int]:
    padded = matrix.weight.shape[-1]
    return {
        "inputs": matrix.inputs,
        "offset": matrix.offset,
        "padded": padded,
        "group": matrix.group,
        "block": matrix.block,
        "tile": max(matrix.block, min(_MAX_INPUTS, triton.next_power_of_2(padded)))
        if matrix.scales is not None
        else min(_MAX_INPUTS, triton.next_power_of_2(padded)),
        "outputs": matrix.outputs_at_once,
        "num_warps": 4,
    }


@triton.jit
def _load_inputs(
    row,
    k,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    packed: tl.constexpr,
):
    """Return the inputs of a row at the padded indices `k`, as float32. If the matrices are packed,
    the inputs are rounded to e4m3."""
    i = k - offset
    values = tl.load(row + i, mask=(i >= 0) & (i < inputs), other=0.0).to(tl.float32)
    if packed:
        rounded, scale = quantize_blocks(tl.reshape(values, [tile // block, block]))
        values = tl.reshape(rounded.to(tl.float32) * scale[:, None], [tile])
    return values


@triton.jit
def _partial_products(
    weight,
    scales,
    values,
    first,
    k,
    end,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    outputs: tl.constexpr,
):
    """Return the weights of `outputs` outputs, from `first` on, times the input values at indices
    `k`, (outputs, inputs). The outputs must share their scales (one group).

    The caller sums the products only once, at the end, because the compiler does not move loads
    across a reduction.
    """
    j = first + tl.arange(0, outputs)
    mask = (j[:, None] < end) & (k[None, :] < padded)
    loaded = tl.load(weight + j[:, None] * padded + k[None, :], mask=mask, other=0.0)
    if scales is not None:
        scale_offsets = first // group * (padded // block) + k // block
        values = values * tl.load(scales + scale_offsets, mask=k < padded, other=0.0)
    return loaded.to(tl.float32) * values[None, :]


@triton.jit
def _activate(
    x,
    weight,
    scales,
    ids,
    intermediate,
    inner,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    outputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate x) * up x for some outputs of one pair."""
    await_previous(overlaps)
    pair, first = tl.program_id(0), tl.program_id(1) * outputs
    expert = tl.load(ids + pair).to(tl.int64)
    weight += expert * (2 * inner * padded)
    if scales is not None:
        scales += expert * (tl.cdiv(2 * inner, group) * (padded // block))
    gates = tl.zeros([outputs, tile], tl.float32)
    ups = tl.zeros([outputs, tile], tl.float32)
    for start in tl.static_range(0, padded, tile):
        k = start + tl.arange(0, tile)
        values = _load_inputs(
            x + (pair // top_k) * inputs, k, inputs, offset, block, tile, scales is not None
        )
        gates += _partial_products(
            weight, scales, values, first, k, inner, padded, group, block, outputs
        )
        ups += _partial_products(
            weight, scales, values, inner + first, k, 2 * inner, padded, group, block, outputs
        )
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    j = first + tl.arange(0, outputs)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(
        intermediate + pair * inner + j, result.to(intermediate.dtype.element_ty), mask=j < inner
    )


@triton.jit
def _project_down(
    intermediate,
    weight,
    scales,
    ids,
    topk_weights,
    y,
    hidden,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    outputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute some outputs of one token, summed over its experts, from the most to the least likely
    one."""
    await_previous(overlaps)
    token, first = tl.program_id(0), tl.program_id(1) * outputs
    total = tl.zeros([outputs, tile], tl.float32)
    for rank in tl.static_range(top_k):
        pair = token * top_k + rank
        expert = tl.load(ids + pair).to(tl.int64)
        routing_weight = tl.load(topk_weights + pair)
        expert_weight = weight + expert * (hidden * padded)
        expert_scales = scales
        if scales is not None:
            expert_scales = scales + expert * (tl.cdiv(hidden, group) * (padded // block))
        for start in tl.static_range(0, padded, tile):
            k = start + tl.arange(0, tile)
            values = _load_inputs(
                intermediate + pair * inputs, k, inputs, offset, block, tile, scales is not None
            )
            total += _partial_products(
                expert_weight,
                expert_scales,
                values * routing_weight,
                first,
                k,
                hidden,
                padded,
                group,
                block,
                outputs,
            )
    j = first + tl.arange(0, outputs)
    result = tl.sum(total, 1).to(y.dtype.element_ty)
    tl.store(y + token * hidden + j, result, mask=j < hidden)
