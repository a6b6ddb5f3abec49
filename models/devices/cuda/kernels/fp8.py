"""Products on FP8 tensor cores in Triton: e4m3 weights with a scale for each block, and activations
that are rounded to e4m3 with a scale for each token and block of inputs.

Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2: each block of inputs is
multiplied separately, and its sums are scaled before they are added in float32.

A tile's rows are outputs and its columns are tokens, because a tensor core instruction takes at
least 64 rows but as few as 8 columns.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from nanoactor.models.weights.fp8 import E4M3, Fp8Blocks
from nanoactor.models.weights.whole_step import PackedMatrix

LARGEST = 448.0
"""Largest e4m3 number."""
_LEAST = 1e-12
"""Lower bound of a block's largest number, so that zeros stay zeros."""
_BLOCKS = (32, 64, 128)
"""Numbers of inputs per block that the kernels support."""
_ROWS = 16
"""Number of outputs that must share a scale: the size of a scale's group is a multiple of it."""
_AT_ONCE = 8
"""Number of blocks that a program quantizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A matrix, or one matrix for each expert, as the kernels read it."""

    weight: torch.Tensor
    """e4m3 weights (..., outputs, blocks * block), with zeros in place of other ranks' inputs."""
    scales: torch.Tensor
    """Scales, float32 (..., groups, blocks), for `group` outputs each."""
    group: int
    block: int
    offset: int
    """Index of the first input within its block."""


def refusal(weights: Fp8Blocks) -> str | None:
    """Return why no kernel supports a matrix, or the matrices of all experts; None if one does."""
    if weights.block not in _BLOCKS:
        return f"the block size {weights.block} is not one of {', '.join(map(str, _BLOCKS))}"
    if weights.group % _ROWS or weights.weight.shape[-2] % _ROWS:
        return f"groups of {_ROWS} outputs have more than one scale"
    return None


def packed_of(weights: Fp8Blocks) -> Packed:
    """Lay out matrices for which `refusal` returned None."""
    weight, scales = weights.weight, weights.scales
    after = scales.shape[-1] * weights.block - weight.shape[-1] - weights.offset
    if weights.offset or after:
        weight = F.pad(weight.view(torch.uint8), (weights.offset, after)).view(E4M3)
    weight, scales = weight.contiguous(), scales.contiguous()
    return Packed(weight, scales, weights.group, weights.block, weights.offset)


def matrix_of(packed: Packed, inputs: int) -> PackedMatrix | None:
    """Return matrices of `inputs` inputs as the whole-step kernel reads them, or None if it
    cannot."""
    outputs, padded = packed.weight.shape[-2:]
    if packed.block != 128 or packed.offset or padded != inputs:
        return None
    tiles = torch.arange(0, outputs, 8, device=packed.scales.device) // packed.group
    return PackedMatrix(packed.weight, packed.scales.index_select(-2, tiles))


# -- activations --------------------------------------------------------------------------


def quantize(x: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `x`, (tokens, inputs), to e4m3. Return the numbers, padded as `packed` is, and their
    scales, float32 (blocks, tokens).

    A block's scale is its largest absolute value divided by 448."""
    tokens, inputs = x.shape
    blocks = packed.scales.shape[-1]
    rounded = torch.empty(tokens, blocks * packed.block, dtype=E4M3, device=x.device)
    scales = torch.empty(blocks, tokens, dtype=torch.float32, device=x.device)
    _quantize[(tokens, triton.cdiv(blocks, _AT_ONCE))](
        x,
        rounded,
        scales,
        inputs,
        tokens,
        offset=packed.offset,
        blocks=blocks,
        block=packed.block,
        at_once=_AT_ONCE,
        num_warps=4,
    )
    return rounded, scales


@triton.jit
def rounded_to(values, largest: tl.constexpr = LARGEST, least: tl.constexpr = _LEAST):
    """Round `values`, (blocks, block), to e4m3. Return them with the scale of each block."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), least) / largest
    return (values / scale[:, None]).to(tl.float8e4nv), scale


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
    at_once: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * at_once + tl.arange(0, at_once)
    k = b[:, None] * block + tl.arange(0, block)[None, :]
    i = k - offset
    there = (i >= 0) & (i < inputs)
    values = tl.load(x + token * inputs + i, mask=there, other=0.0).to(tl.float32)
    found, scale = rounded_to(values)
    tl.store(rounded + token * (blocks * block) + k, found, mask=b[:, None] < blocks)
    tl.store(scales + b * tokens + token, scale, mask=b < blocks)


# -- a product ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work."""

    outputs: int
    tokens: int
    warps: int
    stages: int
    programs: int
    """Number of programs to aim for. If there are fewer tiles, the blocks of inputs are divided
    among several programs, and their sums are added."""


# (maximum number of tokens, tile): few tokens are bandwidth-bound, many compute-bound.
_TILES = (
    (16, Tile(64, 16, 4, 4, 264)),
    (32, Tile(64, 32, 4, 4, 264)),
    (64, Tile(128, 64, 4, 4, 132)),
)
_LARGEST = Tile(64, 128, 4, 4, 132)


def tile_for(tokens: int) -> Tile:
    """Return the tile for `tokens` tokens."""
    return next((tile for most, tile in _TILES if tokens <= most), _LARGEST)


class TritonFp8Linear:
    """The operator x Wᵀ + b for an FP8 matrix."""

    def __init__(self, weights: Fp8Blocks) -> None:
        """Pack weights for which `refusal` returned None."""
        self._packed = packed_of(weights)
        self._inputs = weights.weight.shape[1]
        self.bias = weights.bias

    def matrix(self) -> PackedMatrix | None:
        """Return the weight as the whole-step kernel reads it, or None if it cannot."""
        return matrix_of(self._packed, self._inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs)."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._product(flat).view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        tokens, packed = len(x), self._packed
        outputs, blocks = packed.weight.shape[0], packed.scales.shape[1]
        y = x.new_empty(tokens, outputs)
        if not tokens:
            return y
        tile = tile_for(tokens)
        # Programs for the same outputs are consecutive, so that weights are read once.
        grid = triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs)
        splits = max(1, min(tile.programs // (grid[0] * grid[1]), blocks // 4))
        each = triton.cdiv(blocks, splits)
        splits = triton.cdiv(blocks, each)
        sums = y if splits == 1 else torch.empty(splits, tokens, outputs, device=x.device)
        rounded, scales = quantize(x, packed)
        _multiply[(*grid, splits)](
            rounded,
            scales,
            packed.weight,
            packed.scales,
            self.bias if splits == 1 else None,
            sums,
            tokens,
            outputs=outputs,
            blocks=blocks,
            block=packed.block,
            group=packed.group,
            each=each,
            tile_outputs=tile.outputs,
            tile_tokens=tile.tokens,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _add[(tokens, triton.cdiv(outputs, 1024))](
                sums, self.bias, y, tokens, outputs, splits=splits, at_once=1024, num_warps=4
            )
        return y


@triton.jit
def scales_at(scales, j, b, blocks, known, group: tl.constexpr, one: tl.constexpr):
    """Return the scales of outputs `j` in block `b`, (outputs, 1), or a single scale if `one` is
    set because all outputs are in one group."""
    if one:
        found = tl.load(scales + tl.min(j, 0) // group * blocks + b)
    else:
        found = tl.load(scales + j // group * blocks + b, mask=known, other=0.0)[:, None]
    return found


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
    each: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_tokens: tl.constexpr,
):
    """Compute the sums of one tile over some blocks of inputs."""
    t = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    j = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    split = tl.program_id(2)
    known, there = j < outputs, t < tokens
    inner = tl.arange(0, block)
    rows = weight + j.to(tl.int64)[:, None] * (blocks * block) + inner[None, :]
    columns = x + t.to(tl.int64)[None, :] * (blocks * block) + inner[:, None]
    total = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    begin, end = split * each, tl.minimum(blocks, (split + 1) * each)
    w_scale = scales_at(scales, j, begin, blocks, known, group, group % tile_outputs == 0)
    x_scale = tl.load(x_scales + begin * tokens + t, mask=there, other=0.0)
    for b in range(begin, end):
        w = tl.load(rows + b * block, mask=known[:, None], other=0.0)
        values = tl.load(columns + b * block, mask=there[None, :], other=0.0)
        # The next block's scales are loaded while this block is multiplied.
        after = tl.minimum(b + 1, blocks - 1)
        next_w = scales_at(scales, j, after, blocks, known, group, group % tile_outputs == 0)
        next_x = tl.load(x_scales + after * tokens + t, mask=there, other=0.0)
        total += tl.dot(w, values) * (w_scale * x_scale[None, :])
        w_scale, x_scale = next_w, next_x
    if bias is not None:
        total += tl.load(bias + j, mask=known, other=0.0).to(tl.float32)[:, None]
    at = (split * tokens + t).to(tl.int64)[None, :] * outputs + j[:, None]
    tl.store(sums + at, total.to(sums.dtype.element_ty), mask=known[:, None] & there[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _add(sums, bias, y, tokens, outputs, splits: tl.constexpr, at_once: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * at_once + tl.arange(0, at_once)
    known = j < outputs
    total = tl.zeros([at_once], tl.float32)
    for n in tl.static_range(splits):
        total += tl.load(sums + (n * tokens + token) * outputs + j, mask=known, other=0.0)
    if bias is not None:
        total += tl.load(bias + j, mask=known, other=0.0).to(tl.float32)
    tl.store(y + token * outputs + j, total.to(y.dtype.element_ty), mask=known)
