"""Attention of prompt chunks on Hopper: keys and values come by TMA, a box within a page at a time.

The arithmetic and the order of programs are those of `prefill_attention`. What differs: a tile is
one copy that needs no addresses in registers, the scale is folded into the exponent, and registers
are capped, so that two groups of warps share a multiprocessor.

A descriptor (CUtensorMap) is made on the host at each launch, and is a kernel's argument by value,
as a pointer is. A captured launch has a copy of it: it holds as long as the cache stays in its
place, which every captured kernel asks for, and needs neither an allocator nor memory on the
device.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.kernels.prefill_attention import tokens_per_program


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """The size of a program, and what it may use."""

    rows: int
    """Of its matrix product: tokens times the heads that share a key-value head."""
    tile: int
    """Keys at a time: the height of a box."""
    warps: int
    stages: int
    registers: int | None
    """The most of a thread; None for what the compiler likes."""


WIDE = Variant(rows=128, tile=64, warps=8, stages=2, registers=128)
"""Without the cap a multiprocessor would hold one such program instead of two."""
NARROW = Variant(rows=64, tile=64, warps=4, stages=3, registers=None)
"""For few programs: twice as many, each with half of the tokens."""


def prefill_attention_tma(
    queries: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    output: torch.Tensor,
    variant: Variant,
) -> None:
    """As `prefill_attention`; `scale` is positive, head_dim a power of two from 16 on, and a
    block holds a whole number of the variant's tiles."""
    heads, size = queries.shape[1:]
    blocks, block_size, kv_heads = cache.keys.shape[:3]
    width = kv_heads * size
    shape, strides, box = [blocks * block_size, width], [width, 1], [variant.tile, size]
    group = triton.next_power_of_2(heads // kv_heads)
    planned = tokens_per_program(heads, kv_heads)
    tokens = min(planned, max(1, variant.rows // group))
    parts = planned // tokens
    tables, rows, tiles = batch.tables, batch.prefill_rows, batch.prefill_tiles
    _prefill_tma[(tiles.shape[1] * parts, kv_heads)](
        queries,
        TensorDescriptor(cache.keys, shape, strides, box),
        TensorDescriptor(cache.values, shape, strides, box),
        tables,
        rows,
        tiles,
        output,
        scale * 1.4426950408889634,
        queries.stride(0),
        output.stride(0),
        tables.stride(0),
        rows.stride(0),
        tiles.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        group=group,
        tokens=tokens,
        parts=parts,
        block_size=block_size,
        tile=variant.tile,
        num_warps=variant.warps,
        num_stages=variant.stages,
        maxnreg=variant.registers,
    )


# These strides differ from step to step: no prompt is to wait for the compiler.
@triton.jit(do_not_specialize=["rows_stride", "tiles_stride"])
def _prefill_tma(
    queries,
    keys,
    values,
    tables,
    rows,
    tiles,
    output,
    scale,
    query_stride,
    output_stride,
    table_stride,
    rows_stride,
    tiles_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    parts: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    each: tl.constexpr = heads // kv_heads
    kv_head = tl.program_id(1)
    planned = tl.program_id(0) // parts
    row = tl.load(tiles + planned)
    if row < 0:
        return
    part = tl.load(tiles + tiles_stride + planned) * parts + tl.program_id(0) % parts
    begin = part * tokens
    slot = tl.load(rows + row).to(tl.int64)
    first = tl.load(rows + rows_stride + row)
    count = tl.load(rows + 2 * rows_stride + row)
    context = tl.load(rows + 3 * rows_stride + row)
    if begin >= count:
        return
    table = tables + slot * table_stride

    index = tl.arange(0, tokens * group)
    token = begin + index // group
    member = index % group
    head = kv_head * each + member
    dim = tl.arange(0, size)
    wanted = ((token < count) & (member < each))[:, None]
    offset = (first + token).to(tl.int64)[:, None]
    at = offset * query_stride + head[:, None] * size + dim[None, :]
    query = tl.load(queries + at, mask=wanted, other=0.0)

    best = tl.full([tokens * group], float("-inf"), tl.float32)
    total = tl.zeros([tokens * group], tl.float32)
    sums = tl.zeros([tokens * group, size], tl.float32)
    position = tl.arange(0, tile)
    column = kv_head * size
    end = tl.minimum(context, context - count + begin + tokens)
    # The last position that a query sees: its own; none past the end, for those that pad.
    own = tl.minimum(context - count + token, end - 1)
    # Tiles that all of the program's queries see whole need no mask.
    whole = (context - count + begin + 1) // tile * tile
    for start in tl.range(0, whole, tile):
        place = tl.load(table + start // block_size) * block_size + start % block_size
        key = keys.load([place, column])
        value = values.load([place, column])
        score = tl.dot(query, key.T)
        higher = tl.maximum(best, tl.max(score, 1) * scale)
        share = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        sums = tl.dot(share.to(value.dtype), value, sums)
        best = higher
    for start in tl.range(whole, end, tile):
        place = tl.load(table + start // block_size) * block_size + start % block_size
        key = keys.load([place, column])
        value = values.load([place, column])
        score = tl.dot(query, key.T)
        score = tl.where((start + position)[None, :] <= own[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1) * scale)
        share = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        # A box is whole: behind a context's end it may hold anything, and NaN times 0 is NaN.
        value = tl.where((start + position < end)[:, None], value, 0.0)
        sums = tl.dot(share.to(value.dtype), value, sums)
        best = higher
    result = sums / total[:, None]
    to = offset * output_stride + head[:, None] * size + dim[None, :]
    tl.store(output + to, result.to(output.dtype.element_ty), mask=wanted)
