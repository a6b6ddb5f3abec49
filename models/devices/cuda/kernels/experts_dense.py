"""Grouped GEMMs of experts in the compute dtype, in Triton."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.routing import blocks_of
from nanoactor.models.weights.linear import DenseExperts


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work."""

    rows: int
    """Number of token-expert pairs in a block."""
    outputs: int
    inputs: int
    warps: int
    stages: int


# (maximum mean number of pairs per expert, tile): few are bandwidth-bound, many compute-bound.
_TILES = (
    (8, Tile(16, 32, 128, 4, 4)),
    (32, Tile(32, 64, 64, 4, 4)),
    (96, Tile(64, 128, 64, 4, 3)),
)
_LARGEST = Tile(128, 128, 64, 8, 3)
_LARGEST_FLOAT32 = Tile(32, 32, 32, 4, 2)


def tile_for(pairs: int, experts: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `pairs` pairs over `experts` experts."""
    if dtype == torch.float32:
        return dataclasses.replace(_LARGEST_FLOAT32, rows=16 if pairs <= 8 * experts else 32)
    return next((tile for most, tile in _TILES if pairs <= most * experts), _LARGEST)


def grouped(
    x: torch.Tensor, weights: DenseExperts, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the output of each token-expert pair times its routing weight, (tokens, chosen,
    hidden)."""
    tokens, chosen = ids.shape
    experts, hidden, inner = weights.down.shape
    pairs = tokens * chosen
    tile = tile_for(pairs, experts, x.dtype)
    blocks = blocks_of(ids, experts, tile.rows)
    between = x.new_empty(len(blocks.rows), inner)
    parts = x.new_empty(tokens, chosen, hidden)
    options = {
        "rows": tile.rows,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _activate[(len(blocks.owners), triton.cdiv(inner, tile.outputs))](
        x,
        weights.gate_up,
        rows_of=blocks.rows,
        owners=blocks.owners,
        between=between,
        pairs=pairs,
        chosen=chosen,
        hidden=hidden,
        inner=inner,
        **options,
    )
    _lead_back[(len(blocks.owners), triton.cdiv(hidden, tile.outputs))](
        between,
        weights.down,
        rows_of=blocks.rows,
        owners=blocks.owners,
        shares=shares,
        parts=parts,
        pairs=pairs,
        hidden=hidden,
        inner=inner,
        **options,
    )
    return parts


@triton.jit(do_not_specialize=["pairs"])
def _activate(
    x,
    gate_up,
    rows_of,
    owners,
    between,
    pairs,
    chosen: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Compute silu(gate x) * up x for one block of pairs."""
    block = tl.program_id(0)
    expert = tl.load(owners + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(rows_of + row)
        there = pair < pairs
        token = (pair // chosen).to(tl.int64)
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < inner
        matrix = gate_up + expert.to(tl.int64) * (2 * inner * hidden)
        gate = tl.zeros([rows, outputs], tl.float32)
        up = tl.zeros([rows, outputs], tl.float32)
        for begin in range(0, hidden, inputs):
            i = begin + tl.arange(0, inputs)
            inside = i < hidden
            values = tl.load(
                x + token[:, None] * hidden + i[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            at = matrix + j[None, :] * hidden + i[:, None]
            masked = known[None, :] & inside[:, None]
            gate = tl.dot(values, tl.load(at, mask=masked, other=0.0), gate, input_precision="ieee")
            at += inner * hidden
            up = tl.dot(values, tl.load(at, mask=masked, other=0.0), up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            between + row.to(tl.int64)[:, None] * inner + j[None, :],
            result.to(between.dtype.element_ty),
            mask=there[:, None] & known[None, :],
        )


@triton.jit(do_not_specialize=["pairs"])
def _lead_back(
    between,
    down,
    rows_of,
    owners,
    shares,
    parts,
    pairs,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
):
    """Compute share * down(...) for one block of pairs, and store each pair's result at its
    place."""
    block = tl.program_id(0)
    expert = tl.load(owners + block)
    if expert >= 0:
        row = block * rows + tl.arange(0, rows)
        pair = tl.load(rows_of + row)
        there = pair < pairs
        j = tl.program_id(1) * outputs + tl.arange(0, outputs)
        known = j < hidden
        matrix = down + expert.to(tl.int64) * (hidden * inner)
        total = tl.zeros([rows, outputs], tl.float32)
        for begin in range(0, inner, inputs):
            i = begin + tl.arange(0, inputs)
            inside = i < inner
            values = tl.load(
                between + row.to(tl.int64)[:, None] * inner + i[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            loaded = tl.load(
                matrix + j[None, :] * inner + i[:, None],
                mask=known[None, :] & inside[:, None],
                other=0.0,
            )
            total = tl.dot(values, loaded, total, input_precision="ieee")
        share = tl.load(shares + pair, mask=there, other=0.0)
        tl.store(
            parts + pair.to(tl.int64)[:, None] * hidden + j[None, :],
            (total * share[:, None]).to(parts.dtype.element_ty),
            mask=there[:, None] & known[None, :],
        )
