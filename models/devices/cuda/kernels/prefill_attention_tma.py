"""Causal attention of prompt chunks on Hopper GPUs. TMA, the copy engine, loads keys and values in
boxes that each lie within one cache block.

The arithmetic and the order of programs are those of `prefill_attention`, with three differences.
One copy loads a tile, which needs no addresses in registers. The scale is folded into the exponent.
The number of registers is capped, so that two programs share a multiprocessor.

If there are few programs, a context is divided among several of them, as in `decode_attention`. The
last program to finish combines their sums, which saves a launch. Contexts that one program reads
fast enough are not divided.

A descriptor (CUtensorMap) is created on the host for each launch and passed by value, like a
pointer. It needs neither an allocator nor memory on the device. A captured launch contains a copy
of the descriptor. The copy stays valid, because the cache keeps its address as long as captured
kernels use it.
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
    """The size of a program and its launch options."""

    rows: int
    """Number of rows of the matrix product: tokens, times query heads that share a key-value
    head."""
    tile: int
    """Number of keys that are loaded at a time, which is the height of a box."""
    warps: int
    stages: int
    registers: int | None
    """Maximum number of registers per thread; None to let the compiler decide."""


WIDE = Variant(rows=128, tile=64, warps=8, stages=2, registers=128)
"""Variant for many programs. Without the limit on registers, a multiprocessor would run only one of
its programs at a time instead of two."""
NARROW = Variant(rows=64, tile=64, warps=4, stages=3, registers=None)
"""Variant for few programs. There are twice as many programs as with `WIDE`, each with half of the
tokens."""
_MIN_TILES = 16
"""Minimum number of tiles for each program that shares a context. These 1,024 keys take about 10
us."""
_PROGRAMS_PER_SM, _WAVES = 2, 5
"""Number of programs that run on a multiprocessor at a time, and maximum number of consecutive
waves of programs if contexts are divided."""
_MAX_SPLITS, _SPLIT_COST = 16, 0.04
"""Maximum number of parts of a context, and the cost of each additional part as a fraction of the
time without division."""


@dataclasses.dataclass(frozen=True, slots=True)
class SplitBuffers:
    """Memory for the partial sums of programs that share a context. All steps use the same memory,
    one after the other."""

    sums: torch.Tensor
    """Outputs before normalization, float32 (programs, rows, head_dim)."""
    totals: torch.Tensor
    """Maxima of the scores, and sums of exponentials, float32 (programs, 2, rows)."""
    finished: torch.Tensor
    """Number of finished programs of each divided context, int32 (programs,); 0 between
    launches."""

    @classmethod
    def empty(
        cls, programs: int, variant: Variant, head_dim: int, device: torch.device
    ) -> SplitBuffers:
        """Allocate memory for up to `programs` programs of a variant."""
        dtype = torch.float32
        sums = torch.empty(programs, variant.rows, head_dim, dtype=dtype, device=device)
        totals = torch.empty(programs, 2, variant.rows, dtype=dtype, device=device)
        return cls(sums, totals, torch.zeros(programs, dtype=torch.int32, device=device))

    @staticmethod
    def max_programs(multiprocessors: int) -> int:
        """Return the maximum number of programs of a launch if contexts are divided."""
        return _WAVES * _PROGRAMS_PER_SM * multiprocessors

    def split_count(self, programs: int) -> int:
        """Return the number of parts into which each context is divided, given the number of
        programs without division.

        The estimated time depends on the number of waves of programs, because a nearly empty last
        wave takes as long as a full one. Each additional part adds a fixed cost.
        """
        programs_per_wave = max(1, len(self.finished) // _WAVES)
        max_splits = max(1, min(_MAX_SPLITS, len(self.finished) // programs))
        return min(
            range(1, max_splits + 1),
            key=lambda splits: (
                -(-programs * splits // programs_per_wave) / splits + _SPLIT_COST * splits
            ),
        )


def prefill_attention_tma(
    queries: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    output: torch.Tensor,
    variant: Variant,
    buffers: SplitBuffers | None = None,
) -> None:
    """Write the attention output of the prompt tokens to `output`, as `prefill_attention` does.

    `scale` must be positive, head_dim a power of two of at least 16, and the block size a multiple
    of the variant's tile. If `buffers` is not None, contexts are divided among several programs as
    far as that memory allows.
    """
    heads, size = queries.shape[1:]
    blocks, block_size, kv_heads = cache.keys.shape[:3]
    width = kv_heads * size
    shape, strides, box = [blocks * block_size, width], [width, 1], [variant.tile, size]
    group = triton.next_power_of_2(heads // kv_heads)
    planned_tokens = tokens_per_program(heads, kv_heads)
    tokens = min(planned_tokens, max(1, variant.rows // group))
    tables, rows, tiles = batch.tables, batch.prefill_rows, batch.prefill_tiles
    programs = tiles.shape[1] * (planned_tokens // tokens)
    # Tiles are planned longest first; at least this many programs are not spares for more rows.
    split_programs = min(programs, triton.cdiv(batch.prefill_tokens, tokens))
    has_room = buffers is not None and tokens * group <= buffers.sums.shape[1]
    splits = (
        buffers.split_count(split_programs * kv_heads) if buffers is not None and has_room else 1
    )
    memory: tuple[torch.Tensor | None, ...] = (None, None, None)
    if buffers is not None and splits > 1:
        memory = buffers.sums, buffers.totals, buffers.finished
    _prefill_tma[(programs + split_programs * (splits - 1), kv_heads)](
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
        split_programs,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        group=group,
        tokens=tokens,
        programs_per_tile=planned_tokens // tokens,
        splits=splits,
        min_tiles=_MIN_TILES,
        block_size=block_size,
        tile=variant.tile,
        num_warps=variant.warps,
        num_stages=variant.stages,
        maxnreg=variant.registers,
    )


# These arguments differ from step to step, and no prompt should wait for the compiler.
@triton.jit(
    do_not_specialize=["rows_stride", "tiles_stride", "split_programs"],
    do_not_specialize_on_alignment=["rows", "tiles"],
)
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
    splits_done,
    scale,
    query_stride,
    output_stride,
    table_stride,
    rows_stride,
    tiles_stride,
    split_programs,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    programs_per_tile: tl.constexpr,
    splits: tl.constexpr,
    min_tiles: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    group_size: tl.constexpr = heads // kv_heads
    kv_head = tl.program_id(1)
    # The first programs divide contexts, `splits` per context; the others have one to themselves.
    program, split = tl.program_id(0), 0
    if splits > 1:
        is_split = program < split_programs * splits
        split = tl.where(is_split, program % splits, 0)
        program = tl.where(is_split, program // splits, program - split_programs * (splits - 1))
    tile_index = program // programs_per_tile
    row = tl.load(tiles + tile_index)
    if row < 0:
        return
    first_query = (
        tl.load(tiles + tiles_stride + tile_index) * programs_per_tile + program % programs_per_tile
    ) * tokens
    slot = tl.load(rows + row).to(tl.int64)
    first_token = tl.load(rows + rows_stride + row)
    count = tl.load(rows + 2 * rows_stride + row)
    context = tl.load(rows + 3 * rows_stride + row)
    if first_query >= count:
        return
    table = tables + slot * table_stride
    end = tl.minimum(context, context - count + first_query + tokens)
    used_splits, split_start, split_end = 1, 0, end
    if splits > 1:
        context_tiles = tl.cdiv(end, tile)
        tiles_per_split = tl.maximum(tl.cdiv(context_tiles, splits), min_tiles)
        used_splits = tl.where(program < split_programs, tl.cdiv(context_tiles, tiles_per_split), 1)
        if split >= used_splits:
            return
        split_start = tl.where(used_splits > 1, split * tiles_per_split * tile, 0)
        split_end = tl.where(
            used_splits > 1, tl.minimum(end, split_start + tiles_per_split * tile), end
        )

    query_index = tl.arange(0, tokens * group)
    token = first_query + query_index // group
    group_head = query_index % group
    head = kv_head * group_size + group_head
    dim = tl.arange(0, size)
    query_mask = ((token < count) & (group_head < group_size))[:, None]
    token_offsets = (first_token + token).to(tl.int64)[:, None]
    query_offsets = token_offsets * query_stride + head[:, None] * size + dim[None, :]
    query = tl.load(queries + query_offsets, mask=query_mask, other=0.0)

    m_i = tl.full([tokens * group], float("-inf"), tl.float32)
    l_i = tl.zeros([tokens * group], tl.float32)
    acc = tl.zeros([tokens * group, size], tl.float32)
    position = tl.arange(0, tile)
    column = kv_head * size
    # The last position that a query sees is its own; padding queries see none past the end.
    query_positions = tl.minimum(context - count + token, end - 1)
    # Tiles that are fully visible to all of the program's queries need no mask.
    unmasked_end = (context - count + first_query + 1) // tile * tile
    for start in tl.range(split_start, tl.minimum(unmasked_end, split_end), tile):
        cache_position = tl.load(table + start // block_size) * block_size + start % block_size
        key = keys.load([cache_position, column])
        value = values.load([cache_position, column])
        score = tl.dot(query, key.T)
        m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc)
        m_i = m_new
    for start in tl.range(tl.maximum(split_start, unmasked_end), split_end, tile):
        cache_position = tl.load(table + start // block_size) * block_size + start % block_size
        key = keys.load([cache_position, column])
        value = values.load([cache_position, column])
        score = tl.dot(query, key.T)
        score = tl.where(
            (start + position)[None, :] <= query_positions[:, None], score, float("-inf")
        )
        m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
        if splits > 1:  # a query may see nothing of this part
            m_new = tl.maximum(m_new, -1e30)
        p = tl.exp2(score * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        # A box is always whole: past a context's end it may hold anything, and NaN times 0 is NaN.
        value = tl.where((start + position < end)[:, None], value, 0.0)
        acc = tl.dot(p.to(value.dtype), value, acc)
        m_i = m_new
    output_pointers = output + token_offsets * output_stride + head[:, None] * size + dim[None, :]
    if splits > 1:
        if used_splits == 1:
            _store(output_pointers, acc, l_i, query_mask)
        else:
            # A divided context has `splits` entries: the maxima, totals and sums of its parts.
            buffer_index = (program * kv_heads + kv_head) * splits
            row_pointers = part_totals + 2 * buffer_index * tokens * group + query_index
            sum_pointers = buffer_index.to(tl.int64) * tokens * group * size
            sum_pointers = part_sums + sum_pointers + query_index[:, None] * size + dim[None, :]
            tl.store(row_pointers + 2 * split * tokens * group, m_i)
            tl.store(row_pointers + (2 * split + 1) * tokens * group, l_i)
            tl.store(sum_pointers + split * tokens * group * size, acc)
            # All threads' stores must precede the signal to the last program.
            tl.debug_barrier()
            if tl.atomic_add(splits_done + buffer_index, 1, sem="acq_rel") == used_splits - 1:
                _store_combined(
                    output_pointers,
                    row_pointers,
                    sum_pointers,
                    used_splits,
                    query_mask,
                    tokens * group,
                    size,
                )
                tl.store(splits_done + buffer_index, 0)
    else:
        _store(output_pointers, acc, l_i, query_mask)


@triton.jit
def _store(output_pointers, acc, l_i, query_mask):
    result = acc / l_i[:, None]
    tl.store(output_pointers, result.to(output_pointers.dtype.element_ty), mask=query_mask)


@triton.jit
def _store_combined(
    output_pointers,
    row_pointers,
    sum_pointers,
    used_splits,
    query_mask,
    rows: tl.constexpr,
    size: tl.constexpr,
):
    """Combine the parts of a divided context, which other programs have just written, and store the
    result."""
    m_i = tl.full([rows], -1e30, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, size], tl.float32)
    for part in range(used_splits):
        part_m = tl.load(row_pointers + 2 * part * rows, cache_modifier=".cg")
        part_l = tl.load(row_pointers + (2 * part + 1) * rows, cache_modifier=".cg")
        part_acc = tl.load(sum_pointers + part * rows * size, cache_modifier=".cg")
        m_new = tl.maximum(m_i, part_m)
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(part_m - m_new)
        l_i = l_i * alpha + part_l * beta
        acc = acc * alpha[:, None] + part_acc * beta[:, None]
        m_i = m_new
    _store(output_pointers, acc, l_i, query_mask)
