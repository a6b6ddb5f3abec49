"""Attention of prompt chunks on Hopper: TMA loads keys and values, one box within a block at a
time.

The arithmetic and the order of programs are those of `prefill_attention`, with these differences: a
tile is loaded by one copy, which needs no addresses in registers; the scale is folded into the
exponent; and registers are capped, so that two programs share a multiprocessor.

If there are few programs, several of them share one context, as in `decode_attention`. The last
program to finish combines their sums, which saves a launch. Contexts that one program reads quickly
enough are not divided.

A descriptor (CUtensorMap) is created on the host at each launch and passed by value, like a
pointer. A captured launch holds a copy of it, which is valid as long as the cache stays at its
address, as every captured kernel requires. The descriptor needs neither an allocator nor memory on
the device.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices.cuda.kernels.prefill_attention import tokens_per_program


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """The size of a program, and its resources."""

    rows: int
    """Rows of the matrix product: the number of tokens times the number of heads that share a
    key-value head."""
    tile: int
    """Number of keys at a time, the height of a box."""
    warps: int
    stages: int
    registers: int | None
    """Maximum number of registers per thread, or None to let the compiler decide."""


WIDE = Variant(rows=128, tile=64, warps=8, stages=2, registers=128)
"""Variant for many programs. Without the cap on registers, a multiprocessor would hold one of its
programs instead of two."""
NARROW = Variant(rows=64, tile=64, warps=4, stages=3, registers=None)
"""Variant for few programs: twice as many programs, each with half of the tokens."""
_LEAST_TILES = 16
"""Minimum number of tiles for each program that shares a context: 1,024 keys take about 10 us."""
_AT_ONCE, _WAVES = 2, 5
"""Number of programs that share a multiprocessor, and maximum number of consecutive waves of them
if contexts are divided."""
_MOST_WAYS, _COST = 16, 0.04
"""Maximum number of parts of a context, and the cost of each additional part as a fraction of the
undivided time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Memory for the sums of programs that divide contexts. Steps use it one after the other."""

    sums: torch.Tensor
    """Unnormalized outputs, float32 (programs, rows, head_dim)."""
    totals: torch.Tensor
    """Maxima of the scores and sums of exponentials, float32 (programs, 2, rows)."""
    done: torch.Tensor
    """Number of finished programs of each divided context, int32 (programs,); 0 between
    launches."""

    @classmethod
    def empty(cls, programs: int, variant: Variant, head_dim: int, device: torch.device) -> Parts:
        """Allocate memory for `programs` programs."""
        numbers = torch.float32
        sums = torch.empty(programs, variant.rows, head_dim, dtype=numbers, device=device)
        totals = torch.empty(programs, 2, variant.rows, dtype=numbers, device=device)
        return cls(sums, totals, torch.zeros(programs, dtype=torch.int32, device=device))

    @staticmethod
    def wanted(multiprocessors: int) -> int:
        """Return the maximum number of programs if contexts are divided."""
        return _WAVES * _AT_ONCE * multiprocessors

    def ways(self, programs: int) -> int:
        """Return the number of parts into which the context of each of `programs` programs is
        divided.

        All parts take the same time, so only the number of waves on a multiprocessor matters: a
        nearly empty last wave takes as long as a full one.
        """
        at_once = max(1, len(self.done) // _WAVES)
        most = max(1, min(_MOST_WAYS, len(self.done) // programs))
        return min(range(1, most + 1), key=lambda w: -(-programs * w // at_once) / w + _COST * w)


def prefill_attention_tma(
    queries: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    output: torch.Tensor,
    variant: Variant,
    parts: Parts | None = None,
) -> None:
    """Compute the same as `prefill_attention`. `scale` must be positive, head_dim a power of two of
    at least 16, and a block must hold a whole number of the variant's tiles. With `parts`, programs
    divide contexts as far as its memory allows."""
    heads, size = queries.shape[1:]
    blocks, block_size, kv_heads = cache.keys.shape[:3]
    width = kv_heads * size
    shape, strides, box = [blocks * block_size, width], [width, 1], [variant.tile, size]
    group = triton.next_power_of_2(heads // kv_heads)
    planned = tokens_per_program(heads, kv_heads)
    tokens = min(planned, max(1, variant.rows // group))
    tables, rows, tiles = batch.tables, batch.prefill_rows, batch.prefill_tiles
    programs = tiles.shape[1] * (planned // tokens)
    # Tiles are planned longest first; at least this many programs are not spares for more rows.
    divided = min(programs, triton.cdiv(batch.prefill_tokens, tokens))
    fits = parts is not None and tokens * group <= parts.sums.shape[1]
    ways = parts.ways(divided * kv_heads) if parts is not None and fits else 1
    memory: tuple[torch.Tensor | None, ...] = (None, None, None)
    if parts is not None and ways > 1:
        memory = parts.sums, parts.totals, parts.done
    _prefill_tma[(programs + divided * (ways - 1), kv_heads)](
        queries,
        TensorDescriptor(cache.keys, shape, strides, box),
        TensorDescriptor(cache.values, shape, strides, box),
        tables,
        rows,
        tiles,
        output,
        *memory,
        scale * 1.4426950408889634,
        queries.stride(0),
        output.stride(0),
        tables.stride(0),
        rows.stride(0),
        tiles.stride(0),
        divided,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        group=group,
        tokens=tokens,
        halves=planned // tokens,
        ways=ways,
        least=_LEAST_TILES,
        block_size=block_size,
        tile=variant.tile,
        num_warps=variant.warps,
        num_stages=variant.stages,
        maxnreg=variant.registers,
    )


# These arguments differ from step to step, and no prompt should wait for the compiler.
@triton.jit(do_not_specialize=["rows_stride", "tiles_stride", "divided"])
def _prefill_tma(  # noqa: C901 - a kernel is one function
    queries,
    keys,
    values,
    tables,
    rows,
    tiles,
    output,
    part_sums,
    part_totals,
    parts_done,
    scale,
    query_stride,
    output_stride,
    table_stride,
    rows_stride,
    tiles_stride,
    divided,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    halves: tl.constexpr,
    ways: tl.constexpr,
    least: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    each: tl.constexpr = heads // kv_heads
    kv_head = tl.program_id(1)
    # The first programs divide contexts, `ways` per context; the others have one to themselves.
    number, way = tl.program_id(0), 0
    if ways > 1:
        shared = number < divided * ways
        way = tl.where(shared, number % ways, 0)
        number = tl.where(shared, number // ways, number - divided * (ways - 1))
    planned = number // halves
    row = tl.load(tiles + planned)
    if row < 0:
        return
    begin = (tl.load(tiles + tiles_stride + planned) * halves + number % halves) * tokens
    slot = tl.load(rows + row).to(tl.int64)
    first = tl.load(rows + rows_stride + row)
    count = tl.load(rows + 2 * rows_stride + row)
    context = tl.load(rows + 3 * rows_stride + row)
    if begin >= count:
        return
    table = tables + slot * table_stride
    end = tl.minimum(context, context - count + begin + tokens)
    used, low, high = 1, 0, end
    if ways > 1:
        all_tiles = tl.cdiv(end, tile)
        chunk = tl.maximum(tl.cdiv(all_tiles, ways), least)
        used = tl.where(number < divided, tl.cdiv(all_tiles, chunk), 1)
        if way >= used:
            return
        low = tl.where(used > 1, way * chunk * tile, 0)
        high = tl.where(used > 1, tl.minimum(end, low + chunk * tile), end)

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
    # The last position that a query sees is its own; padding queries see none past the end.
    own = tl.minimum(context - count + token, end - 1)
    # Tiles that are fully visible to all of the program's queries need no mask.
    whole = (context - count + begin + 1) // tile * tile
    for start in tl.range(low, tl.minimum(whole, high), tile):
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
    for start in tl.range(tl.maximum(low, whole), high, tile):
        place = tl.load(table + start // block_size) * block_size + start % block_size
        key = keys.load([place, column])
        value = values.load([place, column])
        score = tl.dot(query, key.T)
        score = tl.where((start + position)[None, :] <= own[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1) * scale)
        if ways > 1:  # a query may see nothing of this part
            higher = tl.maximum(higher, -1e30)
        share = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(share, 1)
        sums = sums * fade[:, None]
        # A box is always whole: past a context's end it may hold anything, and NaN times 0 is NaN.
        value = tl.where((start + position < end)[:, None], value, 0.0)
        sums = tl.dot(share.to(value.dtype), value, sums)
        best = higher
    to = output + offset * output_stride + head[:, None] * size + dim[None, :]
    if ways > 1:
        if used == 1:
            _store(to, sums, total, wanted)
        else:
            # A divided context has `ways` places, one for the maxima, totals and sums of each part.
            place = (number * kv_heads + kv_head) * ways
            rows_at = part_totals + 2 * place * tokens * group + index
            sums_at = place.to(tl.int64) * tokens * group * size
            sums_at = part_sums + sums_at + index[:, None] * size + dim[None, :]
            tl.store(rows_at + 2 * way * tokens * group, best)
            tl.store(rows_at + (2 * way + 1) * tokens * group, total)
            tl.store(sums_at + way * tokens * group * size, sums)
            # All threads' stores must precede the signal to the last program.
            tl.debug_barrier()
            if tl.atomic_add(parts_done + place, 1, sem="acq_rel") == used - 1:
                _store_together(to, rows_at, sums_at, used, wanted, tokens * group, size)
                tl.store(parts_done + place, 0)
    else:
        _store(to, sums, total, wanted)


@triton.jit
def _store(to, sums, total, wanted):
    result = sums / total[:, None]
    tl.store(to, result.to(to.dtype.element_ty), mask=wanted)


@triton.jit
def _store_together(to, rows_at, sums_at, used, wanted, rows: tl.constexpr, size: tl.constexpr):
    """Combine the parts of a context, which other programs have just written, and store the
    result."""
    best = tl.full([rows], -1e30, tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, size], tl.float32)
    for part in range(used):
        its_best = tl.load(rows_at + 2 * part * rows, cache_modifier=".cg")
        its_total = tl.load(rows_at + (2 * part + 1) * rows, cache_modifier=".cg")
        its_sums = tl.load(sums_at + part * rows * size, cache_modifier=".cg")
        higher = tl.maximum(best, its_best)
        fade, share = tl.exp2(best - higher), tl.exp2(its_best - higher)
        total = total * fade + its_total * share
        sums = sums * fade[:, None] + its_sums * share[:, None]
        best = higher
    _store(to, sums, total, wanted)
