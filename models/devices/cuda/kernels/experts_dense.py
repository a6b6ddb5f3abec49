"""Grouped GEMMs of experts whose weights are not packed, in Triton."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.routing import align_blocks
from nanoactor.models.weights.linear import DenseExperts


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The size of the tile that a program computes, and the program's launch options."""

    rows: int
    """Number of token-expert pairs in a tile."""
    outputs: int
    inputs: int
    warps: int
    stages: int


# (maximum mean number of pairs per expert, tile). Few pairs are bound by memory bandwidth, many by
# compute.
_TILES = (
    (8, Tile(16, 32, 128, 4, 4)),
    (32, Tile(32, 64, 64, 4, 4)),
    (96, Tile(64, 128, 64, 4, 3)),
)
_LARGEST = Tile(128, 128, 64, 8, 3)
_LARGEST_FLOAT32 = Tile(32, 32, 32, 4, 2)


def tile_for(pairs: int, experts: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `pairs` token-expert pairs and `experts` experts. More pairs per expert
    need a larger tile."""
    if dtype == torch.float32:
        return dataclasses.replace(_LARGEST_FLOAT32, rows=16 if pairs <= 8 * experts else 32)
    return next(
        (tile for max_mean_pairs, tile in _TILES if pairs <= max_mean_pairs * experts), _LARGEST
    )


def grouped_gemms(
    x: torch.Tensor, weights: DenseExperts, ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Return the output of each token-expert pair, multiplied by its routing weight, (tokens,
    top_k, hidden)."""
    tokens, top_k = ids.shape
    experts, hidden, inner = weights.down.shape
    pairs = tokens * top_k
    tile = tile_for(pairs, experts, x.dtype)
    blocks = align_blocks(ids, experts, tile.rows)
    intermediate = x.new_empty(len(blocks.pair_ids), inner)
    pair_outputs = x.new_empty(tokens, top_k, hidden)
    options = {
        "rows": tile.rows,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _activate[(len(blocks.expert_ids), triton.cdiv(inner, tile.outputs))](
        x,
        weights.gate_up,
        pair_ids=blocks.pair_ids,
        expert_ids=blocks.expert_ids,
        intermediate=intermediate,
        pairs=pairs,
        top_k=top_k,
        hidden=hidden,
        inner=inner,
        **options,
        **dependent_launch(),
    )
    _project_down[(len(blocks.expert_ids), triton.cdiv(hidden, tile.outputs))](
        intermediate,
        weights.down,
        pair_ids=blocks.pair_ids,
        expert_ids=blocks.expert_ids,
        topk_weights=topk_weights,
        pair_outputs=pair_outputs,
        pairs=pairs,
        hidden=hidden,
        inner=inner,
        **options,
        **dependent_launch(),
    )
    return pair_outputs


@triton.jit(do_not_specialize=["pairs"])
def _activate(
    x,
    gate_up,
    pair_ids,
    expert_ids,
    intermediate,
    pairs,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate x) * up x for one block of pairs."""
    await_previous(overlaps)
    block = tl.program_id(0)
    expert = tl.load(expert_ids + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(pair_ids + row)
        row_mask = pair < pairs
        token = (pair // top_k).to(tl.int64)
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        output_mask = j < inner
        matrix = gate_up + expert.to(tl.int64) * (2 * inner * hidden)
        gate = tl.zeros([rows, outputs], tl.float32)
        up = tl.zeros([rows, outputs], tl.float32)
        for start in range(0, hidden, inputs):
            i = start + tl.arange(0, inputs)
            input_mask = i < hidden
            values = tl.load(
                x + token[:, None] * hidden + i[None, :],
                mask=row_mask[:, None] & input_mask[None, :],
                other=0.0,
            )
            pointers = matrix + j[None, :] * hidden + i[:, None]
            weight_mask = output_mask[None, :] & input_mask[:, None]
            gate = tl.dot(
                values, tl.load(pointers, mask=weight_mask, other=0.0), gate, input_precision="ieee"
            )
            pointers += inner * hidden
            up = tl.dot(
                values, tl.load(pointers, mask=weight_mask, other=0.0), up, input_precision="ieee"
            )
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            intermediate + row.to(tl.int64)[:, None] * inner + j[None, :],
            result.to(intermediate.dtype.element_ty),
            mask=row_mask[:, None] & output_mask[None, :],
        )


@triton.jit(do_not_specialize=["pairs"])
def _project_down(
    intermediate,
    down,
    pair_ids,
    expert_ids,
    topk_weights,
    pair_outputs,
    pairs,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute routing weight * down(...) for one block of pairs, and store each result in its
    pair's row."""
    await_previous(overlaps)
    block = tl.program_id(0)
    expert = tl.load(expert_ids + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(pair_ids + row)
        row_mask = pair < pairs
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        output_mask = j < hidden
        matrix = down + expert.to(tl.int64) * (hidden * inner)
        total = tl.zeros([rows, outputs], tl.float32)
        for start in range(0, inner, inputs):
            i = start + tl.arange(0, inputs)
            input_mask = i < inner
            values = tl.load(
                intermediate + row.to(tl.int64)[:, None] * inner + i[None, :],
                mask=row_mask[:, None] & input_mask[None, :],
                other=0.0,
            )
            weights = tl.load(
                matrix + j[None, :] * inner + i[:, None],
                mask=output_mask[None, :] & input_mask[:, None],
                other=0.0,
            )
            total = tl.dot(values, weights, total, input_precision="ieee")
        routing_weights = tl.load(topk_weights + pair, mask=row_mask, other=0.0)
        tl.store(
            pair_outputs + pair.to(tl.int64)[:, None] * hidden + j[None, :],
            (total * routing_weights[:, None]).to(pair_outputs.dtype.element_ty),
            mask=row_mask[:, None] & output_mask[None, :],
        )
