"""Grouped GEMMs of experts on FP8 tensor cores, in Triton; see `fp8.py` for the format.

A tile's rows are outputs, and its columns are the token-expert pairs of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.experts_dense import Tile
from nanoactor.models.devices.cuda.kernels.fp8 import Packed, quantize, scales_at
from nanoactor.models.devices.cuda.kernels.routing import blocks_of

# (maximum mean number of pairs per expert, tile). `inputs` is unused (0): a program reads one block
# of inputs at a time.
_TILES = (
    (8, Tile(16, 64, 0, 4, 4)),
    (32, Tile(32, 64, 0, 4, 4)),
)
_LARGEST = Tile(64, 128, 0, 8, 4)


def tile_for(pairs: int, experts: int) -> Tile:
    """Return the tile for `pairs` pairs over `experts` experts."""
    return next((tile for most, tile in _TILES if pairs <= most * experts), _LARGEST)


def grouped(
    x: torch.Tensor, gate_up: Packed, down: Packed, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the output of each token-expert pair times its routing weight, (tokens, chosen,
    hidden)."""
    tokens, chosen = ids.shape
    experts, hidden = down.weight.shape[:2]
    inner, pairs = gate_up.weight.shape[1] // 2, tokens * chosen
    tile = tile_for(pairs, experts)
    blocks = blocks_of(ids, experts, tile.rows)
    between = x.new_empty(pairs, inner)
    parts = x.new_empty(tokens, chosen, hidden)
    rounded, scales = quantize(x, gate_up)
    _activate[(len(blocks.owners), triton.cdiv(inner, tile.outputs))](
        rounded,
        scales,
        gate_up.weight,
        gate_up.scales,
        rows_of=blocks.rows,
        owners=blocks.owners,
        between=between,
        pairs=pairs,
        tokens=tokens,
        chosen=chosen,
        inner=inner,
        **_sizes(gate_up, tile),
    )
    rounded, scales = quantize(between, down)
    _lead_back[(len(blocks.owners), triton.cdiv(hidden, tile.outputs))](
        rounded,
        scales,
        down.weight,
        down.scales,
        rows_of=blocks.rows,
        owners=blocks.owners,
        shares=shares,
        parts=parts,
        pairs=pairs,
        hidden=hidden,
        **_sizes(down, tile),
    )
    return parts


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
    rows_of,
    owners,
    between,
    pairs,
    tokens,
    chosen: tl.constexpr,
    inner: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
):
    """Compute silu(gate x) * up x for one block of pairs."""
    number = tl.program_id(0)
    expert = tl.load(owners + number)
    if expert >= 0:
        pair = tl.load(rows_of + number * rows + tl.arange(0, rows))
        there = pair < pairs
        token = pair // chosen
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < inner
        inside = tl.arange(0, block)
        width: tl.constexpr = blocks * block
        matrix = weight + expert.to(tl.int64) * (2 * inner * width)
        matrix += j[:, None] * width + inside[None, :]
        columns = x + token.to(tl.int64)[None, :] * width + inside[:, None]
        factors = scales + expert * (tl.cdiv(2 * inner, group) * blocks)
        one: tl.constexpr = group % outputs == 0
        gate = tl.zeros([outputs, rows], tl.float32)
        up = tl.zeros([outputs, rows], tl.float32)
        # The next block's scales are loaded while this block is multiplied.
        row_scale = tl.load(x_scales + token, mask=there, other=0.0)
        gate_scale = scales_at(factors, j, 0, blocks, known, group, one)
        up_scale = scales_at(factors, inner + j, 0, blocks, known, group, one)
        for b in range(blocks):
            values = tl.load(columns + b * block, mask=there[None, :], other=0.0)
            first = tl.load(matrix + b * block, mask=known[:, None], other=0.0)
            second = tl.load(matrix + b * block + inner * width, mask=known[:, None], other=0.0)
            after = tl.minimum(b + 1, blocks - 1)
            next_row = tl.load(x_scales + after * tokens + token, mask=there, other=0.0)
            next_gate = scales_at(factors, j, after, blocks, known, group, one)
            next_up = scales_at(factors, inner + j, after, blocks, known, group, one)
            gate += tl.dot(first, values) * (gate_scale * row_scale[None, :])
            up += tl.dot(second, values) * (up_scale * row_scale[None, :])
            row_scale, gate_scale, up_scale = next_row, next_gate, next_up
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            between + pair.to(tl.int64)[None, :] * inner + j[:, None],
            result.to(between.dtype.element_ty),
            mask=known[:, None] & there[None, :],
        )


@triton.jit(do_not_specialize=["pairs"])
def _lead_back(
    between,
    row_scales,
    weight,
    scales,
    rows_of,
    owners,
    shares,
    parts,
    pairs,
    hidden: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
):
    """Compute share * down(...) for one block of pairs, and store each pair's result at its
    place."""
    number = tl.program_id(0)
    expert = tl.load(owners + number)
    if expert >= 0:
        pair = tl.load(rows_of + number * rows + tl.arange(0, rows))
        there = pair < pairs
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < hidden
        inside = tl.arange(0, block)
        width: tl.constexpr = blocks * block
        matrix = weight + expert.to(tl.int64) * (hidden * width)
        matrix += j[:, None] * width + inside[None, :]
        columns = between + pair.to(tl.int64)[None, :] * width + inside[:, None]
        factors = scales + expert * (tl.cdiv(hidden, group) * blocks)
        one: tl.constexpr = group % outputs == 0
        total = tl.zeros([outputs, rows], tl.float32)
        row_scale = tl.load(row_scales + pair, mask=there, other=0.0)
        scale = scales_at(factors, j, 0, blocks, known, group, one)
        for b in range(blocks):
            values = tl.load(columns + b * block, mask=there[None, :], other=0.0)
            found = tl.load(matrix + b * block, mask=known[:, None], other=0.0)
            after = tl.minimum(b + 1, blocks - 1)
            next_row = tl.load(row_scales + after * pairs + pair, mask=there, other=0.0)
            next_scale = scales_at(factors, j, after, blocks, known, group, one)
            total += tl.dot(found, values) * (scale * row_scale[None, :])
            row_scale, scale = next_row, next_scale
        total *= tl.load(shares + pair, mask=there, other=0.0)[None, :]
        tl.store(
            parts + pair.to(tl.int64)[None, :] * hidden + j[:, None],
            total.to(parts.dtype.element_ty),
            mask=known[:, None] & there[None, :],
        )
