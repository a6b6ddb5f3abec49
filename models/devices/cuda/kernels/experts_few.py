"""Mixture of experts for a few tokens in Triton: each token-expert pair reads its expert's
matrices.

There are two kernels. Pairs that share an expert find its weights in L2. Packed matrices are
unpacked as they are read, and activations are rounded as the format specifies.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.fp8 import Packed, rounded_to
from nanoactor.models.weights.linear import DenseExperts

MOST_PAIRS, MOST_PACKED_PAIRS = 64, 16
"""Maximum numbers of pairs, for dense and for packed matrices; with more, grouped GEMMs are faster
on an H200."""
_OUTPUTS, _PACKED_OUTPUTS = 4, 8
_MOST_INPUTS = 2048
"""Maximum number of inputs that a program reads at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """One projection's matrices of all experts."""

    weight: torch.Tensor
    """Weights, (experts, outputs, padded inputs)."""
    scales: torch.Tensor | None
    inputs: int
    group: int
    block: int
    offset: int

    @property
    def outputs_at_once(self) -> int:
        """Return the number of outputs that a program computes."""
        return _OUTPUTS if self.scales is None else _PACKED_OUTPUTS


@dataclasses.dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a layer's experts."""

    gate_up: Matrix
    down: Matrix


def dense_matrices(weights: DenseExperts) -> Matrices:
    """Wrap dense matrices."""
    whole = (
        Matrix(one, None, one.shape[-1], 1, one.shape[-1], 0)
        for one in (weights.gate_up, weights.down)
    )
    return Matrices(*whole)


def packed_matrices(gate_up: Packed, down: Packed) -> Matrices:
    """Wrap matrices in FP8."""
    inner, hidden = gate_up.weight.shape[1] // 2, down.weight.shape[1]
    return Matrices(
        *(
            Matrix(one.weight, one.scales, inputs, one.group, one.block, one.offset)
            for one, inputs in ((gate_up, hidden), (down, inner))
        )
    )


def through(
    x: torch.Tensor, weights: Matrices, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Implement `Operators.experts`."""
    (tokens, hidden), chosen = x.shape, ids.shape[1]
    inner, outputs = weights.down.inputs, weights.gate_up.outputs_at_once
    between, y = x.new_empty(tokens * chosen, inner), torch.empty_like(x)
    _activate[(tokens * chosen, triton.cdiv(inner, outputs))](
        x,
        weights.gate_up.weight,
        weights.gate_up.scales,
        ids,
        between,
        inner,
        chosen=chosen,
        **_sizes(weights.gate_up),
    )
    _lead_back[(tokens, triton.cdiv(hidden, outputs))](
        between,
        weights.down.weight,
        weights.down.scales,
        ids,
        shares,
        y,
        hidden,
        chosen=chosen,
        **_sizes(weights.down),
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
        "tile": max(matrix.block, min(_MOST_INPUTS, triton.next_power_of_2(padded)))
        if matrix.scales is not None
        else min(_MOST_INPUTS, triton.next_power_of_2(padded)),
        "outputs": matrix.outputs_at_once,
        "num_warps": 4,
    }


@triton.jit
def _inputs_of(
    row,
    k,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    packed: tl.constexpr,
):
    """Load some of a row's inputs in float32, rounded to e4m3 if matrices are packed."""
    i = k - offset
    values = tl.load(row + i, mask=(i >= 0) & (i < inputs), other=0.0).to(tl.float32)
    if packed:
        rounded, scale = rounded_to(tl.reshape(values, [tile // block, block]))
        values = tl.reshape(rounded.to(tl.float32) * scale[:, None], [tile])
    return values


@triton.jit
def _products(
    weight,
    scales,
    values,
    first,
    k,
    most,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    outputs: tl.constexpr,
):
    """Return the products (outputs, inputs) of the outputs from `first` on, which are in one group.

    The caller sums them once, at the end, because loads are not moved across a reduction."""
    j = first + tl.arange(0, outputs)
    there = (j[:, None] < most) & (k[None, :] < padded)
    found = tl.load(weight + j[:, None] * padded + k[None, :], mask=there, other=0.0)
    if scales is not None:
        at = first // group * (padded // block) + k // block
        values = values * tl.load(scales + at, mask=k < padded, other=0.0)
    return found.to(tl.float32) * values[None, :]


@triton.jit
def _activate(
    x,
    weight,
    scales,
    ids,
    between,
    inner,
    chosen: tl.constexpr,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    outputs: tl.constexpr,
):
    """Compute silu(gate x) * up x for some outputs of a pair."""
    pair, first = tl.program_id(0), tl.program_id(1) * outputs
    expert = tl.load(ids + pair).to(tl.int64)
    weight += expert * (2 * inner * padded)
    if scales is not None:
        scales += expert * (tl.cdiv(2 * inner, group) * (padded // block))
    gates = tl.zeros([outputs, tile], tl.float32)
    ups = tl.zeros([outputs, tile], tl.float32)
    for begin in tl.static_range(0, padded, tile):
        k = begin + tl.arange(0, tile)
        values = _inputs_of(
            x + (pair // chosen) * inputs, k, inputs, offset, block, tile, scales is not None
        )
        gates += _products(weight, scales, values, first, k, inner, padded, group, block, outputs)
        ups += _products(
            weight, scales, values, inner + first, k, 2 * inner, padded, group, block, outputs
        )
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    j = first + tl.arange(0, outputs)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(between + pair * inner + j, result.to(between.dtype.element_ty), mask=j < inner)


@triton.jit
def _lead_back(
    between,
    weight,
    scales,
    ids,
    shares,
    y,
    hidden,
    chosen: tl.constexpr,
    inputs: tl.constexpr,
    offset: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    outputs: tl.constexpr,
):
    """Compute some outputs of a token, summed in the order of its choices."""
    token, first = tl.program_id(0), tl.program_id(1) * outputs
    total = tl.zeros([outputs, tile], tl.float32)
    for n in tl.static_range(chosen):
        pair = token * chosen + n
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(shares + pair)
        own = weight + expert * (hidden * padded)
        factors = scales
        if scales is not None:
            factors = scales + expert * (tl.cdiv(hidden, group) * (padded // block))
        for begin in tl.static_range(0, padded, tile):
            k = begin + tl.arange(0, tile)
            values = _inputs_of(
                between + pair * inputs, k, inputs, offset, block, tile, scales is not None
            )
            total += _products(
                own, factors, values * share, first, k, hidden, padded, group, block, outputs
            )
    j = first + tl.arange(0, outputs)
    found = tl.sum(total, 1).to(y.dtype.element_ty)
    tl.store(y + token * hidden + j, found, mask=j < hidden)
