"""Grouped GEMMs of experts on FP8 tensor cores, in Triton. The format is described in `fp8.py`.

The rows of a tile are outputs, and its columns are the token-expert pairs of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.experts_dense import Tile
from nanoactor.models.devices.cuda.kernels.fp8 import Packed, load_scales, quantize
from nanoactor.models.devices.cuda.kernels.rounding import Rows
from nanoactor.models.devices.cuda.kernels.routing import align_blocks

# (maximum mean number of pairs per expert, tile). `inputs` is unused (0), because a program reads
# one block of inputs at a time.
_TILES = (
    (8, Tile(16, 64, 0, 4, 3)),
    (32, Tile(32, 64, 0, 4, 3)),
)
_LARGEST = Tile(64, 128, 0, 8, 4)


def tile_for(pairs: int, experts: int) -> Tile:
    """Return the tile for `pairs` token-expert pairs and `experts` experts. More pairs per expert
    need a larger tile."""
    return next(
        (tile for max_mean_pairs, tile in _TILES if pairs <= max_mean_pairs * experts), _LARGEST
    )


def grouped_gemms(
    x: torch.Tensor,
    rows: Rows | None,
    gate_up: Packed,
    down: Packed,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the output of each token-expert pair, multiplied by its routing weight, (tokens,
    top_k, hidden).

    `rows` are the rounded rows of `x`, or None if they are not available.
    """
    tokens, top_k = ids.shape
    experts, hidden = down.weight.shape[:2]
    inner, pairs = gate_up.weight.shape[1] // 2, tokens * top_k
    tile = tile_for(pairs, experts)
    blocks = align_blocks(ids, experts, tile.rows)
    intermediate = x.new_empty(pairs, inner)
    pair_outputs = x.new_empty(tokens, top_k, hidden)
    rows = rows or quantize(x, gate_up)
    _activate[(len(blocks.expert_ids), triton.cdiv(inner, tile.outputs))](
        rows.values,
        rows.scales,
        gate_up.weight,
        gate_up.scales,
        pair_ids=blocks.pair_ids,
        expert_ids=blocks.expert_ids,
        intermediate=intermediate,
        pairs=pairs,
        tokens=tokens,
        top_k=top_k,
        inner=inner,
        **_sizes(gate_up, tile),
        **dependent_launch(),
    )
    rows = quantize(intermediate, down)
    _project_down[(len(blocks.expert_ids), triton.cdiv(hidden, tile.outputs))](
        rows.values,
        rows.scales,
        down.weight,
        down.scales,
        pair_ids=blocks.pair_ids,
        expert_ids=blocks.expert_ids,
        topk_weights=topk_weights,
        pair_outputs=pair_outputs,
        pairs=pairs,
        hidden=hidden,
        **_sizes(down, tile),
        **dependent_launch(),
    )
    return pair_outputs


def _sizes(matrices: Packed, tile: Tile) -> dict[str, int]:
    return {
        "blocks": matrices.scales.shape[-1],
        "block": matrices.block,
        "group": matrices.group,
        "rows": tile.rows,
        "outputs": tile.outputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _activate(
    x,
    x_scales,
    weight,
    scales,
    pair_ids,
    expert_ids,
    intermediate,
    pairs,
    tokens,
    top_k: tl.constexpr,
    inner: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate x) * up x for one block of pairs."""
    await_previous(overlaps)
    block_index = tl.program_id(0)
    expert = tl.load(expert_ids + block_index)
    if expert >= 0:
        pair = tl.load(pair_ids + block_index * rows + tl.arange(0, rows))
        row_mask = pair < pairs
        token = pair // top_k
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        output_mask = j < inner
        inner_index = tl.arange(0, block)
        width: tl.constexpr = blocks * block
        matrix = weight + expert.to(tl.int64) * (2 * inner * width)
        matrix += j[:, None] * width + inner_index[None, :]
        columns = x + token.to(tl.int64)[None, :] * width + inner_index[:, None]
        expert_scales = scales + expert * (tl.cdiv(2 * inner, group) * blocks)
        uniform_scale: tl.constexpr = group % outputs == 0
        gate = tl.zeros([outputs, rows], tl.float32)
        up = tl.zeros([outputs, rows], tl.float32)
        # The next block's scales are loaded while this block is multiplied.
        row_scale = tl.load(x_scales + token, mask=row_mask, other=0.0)
        gate_scale = load_scales(expert_scales, j, 0, blocks, output_mask, group, uniform_scale)
        up_scale = load_scales(
            expert_scales, inner + j, 0, blocks, output_mask, group, uniform_scale
        )
        for k_block in range(blocks):
            values = tl.load(columns + k_block * block, mask=row_mask[None, :], other=0.0)
            gate_weights = tl.load(matrix + k_block * block, mask=output_mask[:, None], other=0.0)
            up_weights = tl.load(
                matrix + k_block * block + inner * width, mask=output_mask[:, None], other=0.0
            )
            next_block = tl.minimum(k_block + 1, blocks - 1)
            next_row = tl.load(x_scales + next_block * tokens + token, mask=row_mask, other=0.0)
            next_gate = load_scales(
                expert_scales, j, next_block, blocks, output_mask, group, uniform_scale
            )
            next_up = load_scales(
                expert_scales, inner + j, next_block, blocks, output_mask, group, uniform_scale
            )
            gate += tl.dot(gate_weights, values) * (gate_scale * row_scale[None, :])
            up += tl.dot(up_weights, values) * (up_scale * row_scale[None, :])
            row_scale, gate_scale, up_scale = next_row, next_gate, next_up
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            intermediate + pair.to(tl.int64)[None, :] * inner + j[:, None],
            result.to(intermediate.dtype.element_ty),
            mask=output_mask[:, None] & row_mask[None, :],
        )


@triton.jit(do_not_specialize=["pairs"])
def _project_down(
    intermediate,
    row_scales,
    weight,
    scales,
    pair_ids,
    expert_ids,
    topk_weights,
    pair_outputs,
    pairs,
    hidden: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute routing weight * down(...) for one block of pairs, and store each result in its
    pair's row."""
    await_previous(overlaps)
    block_index = tl.program_id(0)
    expert = tl.load(expert_ids + block_index)
    if expert >= 0:
        pair = tl.load(pair_ids + block_index * rows + tl.arange(0, rows))
        row_mask = pair < pairs
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        output_mask = j < hidden
        inner_index = tl.arange(0, block)
        width: tl.constexpr = blocks * block
        matrix = weight + expert.to(tl.int64) * (hidden * width)
        matrix += j[:, None] * width + inner_index[None, :]
        columns = intermediate + pair.to(tl.int64)[None, :] * width + inner_index[:, None]
        expert_scales = scales + expert * (tl.cdiv(hidden, group) * blocks)
        uniform_scale: tl.constexpr = group % outputs == 0
        total = tl.zeros([outputs, rows], tl.float32)
        row_scale = tl.load(row_scales + pair, mask=row_mask, other=0.0)
        scale = load_scales(expert_scales, j, 0, blocks, output_mask, group, uniform_scale)
        for k_block in range(blocks):
            values = tl.load(columns + k_block * block, mask=row_mask[None, :], other=0.0)
            weights = tl.load(matrix + k_block * block, mask=output_mask[:, None], other=0.0)
            next_block = tl.minimum(k_block + 1, blocks - 1)
            next_row = tl.load(row_scales + next_block * pairs + pair, mask=row_mask, other=0.0)
            next_scale = load_scales(
                expert_scales, j, next_block, blocks, output_mask, group, uniform_scale
            )
            total += tl.dot(weights, values) * (scale * row_scale[None, :])
            row_scale, scale = next_row, next_scale
        total *= tl.load(topk_weights + pair, mask=row_mask, other=0.0)[None, :]
        tl.store(
            pair_outputs + pair.to(tl.int64)[None, :] * hidden + j[:, None],
            total.to(pair_outputs.dtype.element_ty),
            mask=output_mask[:, None] & row_mask[None, :],
        )
