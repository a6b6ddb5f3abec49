"""Matrix products on FP8 tensor cores, in Triton.

Weights are e4m3 with a scale for each block. Activations are rounded to e4m3 with a scale for each
token and block of inputs. Each block of inputs is multiplied separately, and its sums are scaled
before they are added in float32. Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section
3.3.2.

The rows of a tile are outputs and its columns are tokens, because a tensor core instruction needs
at least 64 rows but as few as 8 columns.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.rounding import (
    RoundingOperator,
    Rows,
    quantize_blocks,
)
from nanoactor.models.weights.fp8 import E4M3, Fp8Blocks
from nanoactor.models.weights.whole_step import PackedMatrix

_BLOCK_SIZES = (32, 64, 128)
"""Numbers of inputs per block that the kernels support."""
_GROUP_MULTIPLE = 16
"""Number of consecutive outputs that must share a scale. The number of outputs per scale must be a
multiple of it."""
_BLOCKS_PER_PROGRAM = 8
"""Number of blocks of inputs that a program quantizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """An FP8 matrix, or one matrix for each expert, as the kernels read it."""

    weight: torch.Tensor
    """e4m3 weights, (..., outputs, blocks * block). If other ranks have a part of a block's inputs,
    that part is zero here."""
    scales: torch.Tensor
    """Scale of each group of `group` outputs in each block of inputs, float32 (..., groups,
    blocks)."""
    group: int
    block: int
    offset: int
    """Index of the first input within its block."""


def unsupported_reason(weights: Fp8Blocks) -> str | None:
    """Return why no kernel supports a matrix (or the matrices of all experts), or None if one
    does."""
    if weights.block not in _BLOCK_SIZES:
        return f"the block size {weights.block} is not one of {', '.join(map(str, _BLOCK_SIZES))}"
    if weights.group % _GROUP_MULTIPLE or weights.weight.shape[-2] % _GROUP_MULTIPLE:
        return f"groups of {_GROUP_MULTIPLE} outputs have more than one scale"
    return None


def pack(weights: Fp8Blocks) -> Packed:
    """Convert matrices to the form that the kernels read. `unsupported_reason` must have returned
    None."""
    weight, scales = weights.weight, weights.scales
    padding = scales.shape[-1] * weights.block - weight.shape[-1] - weights.offset
    if weights.offset or padding:
        weight = F.pad(weight.view(torch.uint8), (weights.offset, padding)).view(E4M3)
    weight, scales = weight.contiguous(), scales.contiguous()
    return Packed(weight, scales, weights.group, weights.block, weights.offset)


def whole_step_matrix(packed: Packed, inputs: int) -> PackedMatrix | None:
    """Convert `packed`, which has `inputs` inputs, to the form that the whole-step kernel reads.
    Return None if the kernel cannot read it."""
    outputs, padded = packed.weight.shape[-2:]
    if packed.block != 128 or packed.offset or padded != inputs:
        return None
    tiles = torch.arange(0, outputs, 8, device=packed.scales.device) // packed.group
    return PackedMatrix(packed.weight, packed.scales.index_select(-2, tiles))


# -- activations --------------------------------------------------------------------------


def memory_for(x: torch.Tensor, packed: Packed) -> Rows | None:
    """Return memory for the rounded rows of `x`, (tokens, inputs), or None if they need padding."""
    blocks = packed.scales.shape[-1]
    if packed.offset or blocks * packed.block != x.shape[1]:
        return None
    return Rows.empty(blocks, packed.block, len(x), x.device)


def quantize(x: torch.Tensor, packed: Packed) -> Rows:
    """Return `x`, (tokens, inputs), rounded to e4m3 and padded like `packed`.

    The scale of a block is its largest absolute value divided by 448.
    """
    tokens, inputs = x.shape
    blocks = packed.scales.shape[-1]
    rows = Rows.empty(blocks, packed.block, tokens, x.device)
    _quantize[(tokens, triton.cdiv(blocks, _BLOCKS_PER_PROGRAM))](
        x,
        rows.values,
        rows.scales,
        inputs,
        tokens,
        offset=packed.offset,
        blocks=blocks,
        block=packed.block,
        blocks_per_program=_BLOCKS_PER_PROGRAM,
        num_warps=4,
        **dependent_launch(),
    )
    return rows


@triton.jit(do_not_specialize=["tokens"])
def _quantize(
    x,
    rounded,
    scales,
    inputs,
    tokens,
    offset: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    blocks_per_program: tl.constexpr,
    overlaps: tl.constexpr,
):
    await_previous(overlaps)
    token = tl.program_id(0).to(tl.int64)
    block_index = tl.program_id(1) * blocks_per_program + tl.arange(0, blocks_per_program)
    k = block_index[:, None] * block + tl.arange(0, block)[None, :]
    i = k - offset
    mask = (i >= 0) & (i < inputs)
    values = tl.load(x + token * inputs + i, mask=mask, other=0.0).to(tl.float32)
    values_e4m3, scale = quantize_blocks(values)
    tl.store(
        rounded + token * (blocks * block) + k, values_e4m3, mask=block_index[:, None] < blocks
    )
    tl.store(scales + block_index * tokens + token, scale, mask=block_index < blocks)


# -- a product ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The size of the tile that a program computes, and the program's launch options."""

    outputs: int
    tokens: int
    warps: int
    stages: int
    programs: int
    """Number of programs to aim for. If there are fewer tiles, the blocks of inputs are divided
    among several programs, whose sums are then added."""


# (maximum number of tokens, tile). Few tokens are bound by memory bandwidth, many by compute.
_TILES = (
    (16, Tile(64, 16, 4, 4, 264)),
    (32, Tile(64, 32, 4, 4, 264)),
    (64, Tile(64, 64, 4, 4, 264)),
)
_LARGEST = Tile(64, 128, 4, 4, 132)


def tile_for(tokens: int) -> Tile:
    """Return the tile for a product with `tokens` tokens."""
    return next((tile for max_tokens, tile in _TILES if tokens <= max_tokens), _LARGEST)


class TritonFp8Linear(RoundingOperator):
    """The operator x Wᵀ + b for an FP8 matrix, in Triton."""

    def __init__(self, weights: Fp8Blocks) -> None:
        """Pack the weights. `unsupported_reason` must have returned None for them."""
        self._packed = pack(weights)
        self._inputs = weights.weight.shape[1]
        self.bias = weights.bias

    def matrix(self) -> PackedMatrix | None:
        """Return the weight in the form that the whole-step kernel reads, or None if it cannot read
        it."""
        return whole_step_matrix(self._packed, self._inputs)

    def memory_for(self, x: torch.Tensor) -> Rows | None:
        """Return memory for the rounded rows of `x`, (tokens, inputs), or None if they need
        padding."""
        return memory_for(x, self._packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, (..., outputs), for `x` (..., inputs)."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._product(flat, self.take(flat)).view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """Return the product of `x`, (tokens, inputs), whose rounded rows are `rows` unless it is
        None."""
        tokens, packed = len(x), self._packed
        outputs, blocks = packed.weight.shape[0], packed.scales.shape[1]
        y = x.new_empty(tokens, outputs)
        if not tokens:
            return y
        tile = tile_for(tokens)
        # Programs for the same outputs are consecutive, so that weights are read once.
        grid = triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs)
        splits = max(1, min(tile.programs // (grid[0] * grid[1]), blocks // 4))
        blocks_per_split = triton.cdiv(blocks, splits)
        splits = triton.cdiv(blocks, blocks_per_split)
        sums = y if splits == 1 else torch.empty(splits, tokens, outputs, device=x.device)
        rows = rows or quantize(x, packed)
        _multiply[(*grid, splits)](
            rows.values,
            rows.scales,
            packed.weight,
            packed.scales,
            self.bias if splits == 1 else None,
            sums,
            tokens,
            outputs=outputs,
            blocks=blocks,
            block=packed.block,
            group=packed.group,
            blocks_per_split=blocks_per_split,
            tile_outputs=tile.outputs,
            tile_tokens=tile.tokens,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **dependent_launch(),
        )
        if splits > 1:
            _add_splits[(tokens, triton.cdiv(outputs, 1024))](
                sums,
                self.bias,
                y,
                tokens,
                outputs,
                splits=splits,
                tile=1024,
                num_warps=4,
                **dependent_launch(),
            )
        return y


@triton.jit
def load_scales(scales, j, block_index, blocks, mask, group: tl.constexpr, uniform: tl.constexpr):
    """Return the scales of outputs `j` in one block of inputs, (outputs, 1).

    If `uniform` is True, all of these outputs must share one scale, and the result is a scalar.
    """
    if uniform:
        loaded = tl.load(scales + tl.min(j, 0) // group * blocks + block_index)
    else:
        loaded = tl.load(scales + j // group * blocks + block_index, mask=mask, other=0.0)[:, None]
    return loaded


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x,
    x_scales,
    weight,
    scales,
    bias,
    sums,
    tokens,
    outputs: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    blocks_per_split: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_tokens: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute the sums of one tile over some of the blocks of inputs."""
    await_previous(overlaps)
    t = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    j = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    split = tl.program_id(2)
    output_mask, token_mask = j < outputs, t < tokens
    inner = tl.arange(0, block)
    rows = weight + j.to(tl.int64)[:, None] * (blocks * block) + inner[None, :]
    columns = x + t.to(tl.int64)[None, :] * (blocks * block) + inner[:, None]
    total = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    start, end = split * blocks_per_split, tl.minimum(blocks, (split + 1) * blocks_per_split)
    w_scale = load_scales(scales, j, start, blocks, output_mask, group, group % tile_outputs == 0)
    x_scale = tl.load(x_scales + start * tokens + t, mask=token_mask, other=0.0)
    for k_block in range(start, end):
        weights = tl.load(rows + k_block * block, mask=output_mask[:, None], other=0.0)
        values = tl.load(columns + k_block * block, mask=token_mask[None, :], other=0.0)
        # The next block's scales are loaded while this block is multiplied.
        next_block = tl.minimum(k_block + 1, blocks - 1)
        next_w = load_scales(
            scales, j, next_block, blocks, output_mask, group, group % tile_outputs == 0
        )
        next_x = tl.load(x_scales + next_block * tokens + t, mask=token_mask, other=0.0)
        total += tl.dot(weights, values) * (w_scale * x_scale[None, :])
        w_scale, x_scale = next_w, next_x
    if bias is not None:
        total += tl.load(bias + j, mask=output_mask, other=0.0).to(tl.float32)[:, None]
    offsets = (split * tokens + t).to(tl.int64)[None, :] * outputs + j[:, None]
    tl.store(
        sums + offsets,
        total.to(sums.dtype.element_ty),
        mask=output_mask[:, None] & token_mask[None, :],
    )


@triton.jit(do_not_specialize=["tokens"])
def _add_splits(
    sums, bias, y, tokens, outputs, splits: tl.constexpr, tile: tl.constexpr, overlaps: tl.constexpr
):
    await_previous(overlaps)
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = j < outputs
    total = tl.zeros([tile], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(sums + (split * tokens + token) * outputs + j, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + j, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * outputs + j, total.to(y.dtype.element_ty), mask=mask)
