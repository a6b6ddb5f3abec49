"""Attention of one new token per row over the paged cache, with contexts split into chunks.

Because of the chunks, a few long rows occupy the whole GPU just as many short rows do
(flash-decoding: Dao et al., 2023). `plan_splits` assigns chunks to programs once for all layers of
a step. It runs on the device, so captured graphs do not need the host.

The query heads that share a key-value head are the rows of one matrix product, so keys and values
are read once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.rounding import (
    offer_rows,
    rounding_arguments,
    store_rounded,
)
from nanoactor.models.devices.protocols import Consumer

_TILE = 64
"""Number of positions that a program reads at a time. Chunk lengths are multiples of it."""
_LARGE_BLOCK_CONFIG, _SMALL_BLOCK_CONFIG = (4, 3), (2, 5)
"""(warps, pipeline stages) for tiles within one cache block, and for tiles gathered from several
blocks. Measured on an H200 with bench/kernels.py."""
_MAX_EXTRA_CHUNKS = 1024
"""Limit on the additional chunks that a step has in proportion to its rows. It is enough to keep
any GPU busy."""
_WAVES = 2
"""Number of programs per place on the GPU that is best for rows of similar lengths. Measured on an
H200 with bench/decode_chunks.py."""
_SKEWED_TILES = 11
"""Number of tiles per chunk that is best for many short rows and a few long ones. Measured in the
same way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splits:
    """The chunks into which the contexts of a step's rows are split, and memory for their
    results."""

    rows: torch.Tensor
    """Row of each chunk, int32 (chunks,), in ascending order."""
    chunk_indices: torch.Tensor
    """Index of each chunk within its row, int32 (chunks,)."""
    first_items: torch.Tensor
    """Index of each row's first chunk, int32 (rows,)."""
    plan: torch.Tensor
    """int32 (2,): number of positions in a chunk, and number of chunks in use."""
    outputs: torch.Tensor
    """Attention output of each chunk, float32 (chunks, heads, head_dim)."""
    lse: torch.Tensor
    """Base-2 logarithm of each chunk's sum of exponentials, float32 (chunks, heads)."""
    arrivals: torch.Tensor
    """Number of chunks of each row and key-value head that are stored, int32 (rows * kv_heads,). It
    is 0 between kernels."""
    chunks_per_wave: int
    """Number of chunks (of all key-value heads) in a wave, the unit in which `plan_splits`
    counts."""

    @classmethod
    def empty(
        cls, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> Splits:
        """Allocate memory for up to `rows` rows."""
        items = rows + _target_extra_chunks(rows, kv_heads, device)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            ints(items),
            ints(items),
            ints(rows),
            ints(2),
            torch.empty(items, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(items, heads, dtype=torch.float32, device=device),
            ints(rows * kv_heads),
            max(1, _programs_per_wave(head_dim, device) // kv_heads),
        )

    def for_rows(self, rows: int, kv_heads: int) -> Splits:
        """Return a view of this memory for `rows` rows."""
        items = min(len(self.rows), rows + _target_extra_chunks(rows, kv_heads, self.rows.device))
        return Splits(
            self.rows[:items],
            self.chunk_indices[:items],
            self.first_items[:rows],
            self.plan,
            self.outputs[:items],
            self.lse[:items],
            self.arrivals,
            self.chunks_per_wave,
        )


def _programs_per_wave(head_dim: int, device: torch.device) -> int:
    """Return the number of programs in a wave: as many as the GPU's shared memory would have room
    for if each stage had its own buffers in a 16-bit dtype.

    More programs may run at the same time, because the compiler buffers fewer stages. The limits in
    `plan_splits` were measured in this unit.
    """
    if device.type != "cuda":  # in the interpreter
        return 2
    properties = torch.cuda.get_device_properties(device)
    _, stages = _LARGE_BLOCK_CONFIG
    program_bytes = stages * 2 * _TILE * max(16, triton.next_power_of_2(head_dim)) * 2
    per_processor = max(1, properties.shared_memory_per_multiprocessor // program_bytes)
    return int(properties.multi_processor_count * per_processor)


def _target_extra_chunks(rows: int, kv_heads: int, device: torch.device) -> int:
    """Return the number of chunks that a step should have in addition to one per row.

    This is enough for four waves of programs, or three per row up to `_MAX_EXTRA_CHUNKS`, whichever
    is more.
    """
    processors = 1  # in the interpreter
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(-(-4 * processors // kv_heads), min(3 * rows, _MAX_EXTRA_CHUNKS))


def plan_splits(contexts: torch.Tensor, splits: Splits) -> None:
    """Split `contexts`, int32 (rows,), into chunks of equal length, and store the chunks in
    `splits`.

    If the contexts have similar lengths, the chunks are as short as possible while all of them run
    in two waves, because a third wave would be nearly empty. If there are rows for more than three
    and a half waves, they are not split. If the lengths differ, the chunks are about as short as
    the memory of `splits` allows, so that the longest context does not end alone. If the longest is
    more than four times as long as the mean, they are longer, because short ones cost more to start
    than they save.
    """
    rows = len(contexts)
    _plan_splits[(1,)](
        contexts,
        splits.rows,
        splits.chunk_indices,
        splits.first_items,
        splits.plan,
        rows,
        len(splits.rows) - rows,
        splits.chunks_per_wave,
        waves=_WAVES,
        skewed_tiles=_SKEWED_TILES,
        tile=_TILE,
        # Fewer rows do not need another variant of the kernel. If decode steps of few rows run in
        # the whole-step kernel, it would be compiled only when a long prompt needs it.
        block=max(128, triton.next_power_of_2(rows)),
        num_warps=4 if rows <= 512 else 8,
        **dependent_launch(),
    )


@triton.jit(
    do_not_specialize=["rows", "extra_chunks", "chunks_per_wave"],
    do_not_specialize_on_alignment=["contexts"],
)
def _plan_splits(
    contexts,
    item_rows,
    item_chunks,
    first_items,
    plan,
    rows,
    extra_chunks,
    chunks_per_wave,
    waves: tl.constexpr,
    skewed_tiles: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    await_previous(overlaps)
    row = tl.arange(0, block)
    context = tl.load(contexts + row, mask=row < rows, other=0)
    # Rounding up adds less than one chunk per row, so there is room for all items.
    tiles = tl.cdiv(context, tile)
    total = tl.sum(tiles, 0)
    longest = tl.max(tiles, 0)
    # Longer chunks would leave places without work at the end.
    limit = (2 * total.to(tl.int64) // (3 * chunks_per_wave)).to(tl.int32)
    is_skewed = longest.to(tl.int64) * rows > 4 * total.to(tl.int64)
    shortest = tl.maximum(tl.cdiv(total, extra_chunks), 1)
    shortest = tl.where(is_skewed, tl.maximum(tl.minimum(limit, skewed_tiles), shortest), shortest)
    # The shortest chunks that are at most `waves` for each place, by bisection.
    low, high = shortest, tl.maximum(longest, shortest)
    while low < high:
        middle = (low + high) // 2
        is_enough = tl.sum(tl.cdiv(tiles, middle), 0) <= waves * chunks_per_wave
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    fits = tl.sum(tl.cdiv(tiles, high), 0) <= waves * chunks_per_wave
    chunk_length = tl.where(fits & (high <= limit), high, shortest)
    are_similar = 4 * longest.to(tl.int64) * rows <= 5 * total.to(tl.int64)
    is_many = 2 * rows > 7 * chunks_per_wave
    chunk_length = tl.where(are_similar & is_many, tl.maximum(longest, 1), chunk_length) * tile
    counts = tl.cdiv(context, chunk_length)
    ends = tl.cumsum(counts, 0)
    starts = ends - counts
    tl.store(first_items + row, starts, mask=row < rows)
    tl.store(plan, chunk_length)
    tl.store(plan + 1, tl.sum(counts, 0))
    for index in range(tl.max(counts, 0)):
        has_chunk = index < counts
        tl.store(item_rows + starts + index, row, mask=has_chunk)
        tl.store(item_chunks + starts + index, index + row * 0, mask=has_chunk)


def decode_attention(
    queries: torch.Tensor,
    cache: KVCache,
    tables: torch.Tensor,
    slots: torch.Tensor,
    contexts: torch.Tensor,
    splits: Splits,
    scale: float,
    output: torch.Tensor,
    consumer: Consumer = None,
) -> None:
    """Write the attention output of `queries`, (rows, heads, head_dim), to `output`, of the same
    shape.

    `tables`, int32 (slots, blocks), contains block tables, and `slots`, int32 (rows,), the index of
    each row's table. `contexts`, int32 (rows,), are the context lengths including the new tokens.
    `plan_splits` must have run for these contexts. If `consumer` is an operator that needs rounded
    rows, it gets them.
    """
    heads, size = queries.shape[1:]
    kv_heads, block_size = cache.keys.shape[2], cache.keys.shape[1]
    padded = max(16, triton.next_power_of_2(size))
    warps, stages = _SMALL_BLOCK_CONFIG if block_size % _TILE else _LARGE_BLOCK_CONFIG
    group = max(16, triton.next_power_of_2(heads // kv_heads))
    # A head must be one block; no operator has blocks of 0.
    rows = offer_rows(consumer, output.flatten(1), block=size if size == padded else 0)
    adds_up = len(contexts) > _WAVES * splits.chunks_per_wave
    _decode_chunks[(kv_heads, len(splits.rows))](
        queries,
        cache.keys,
        cache.values,
        tables,
        slots,
        contexts,
        splits.rows,
        splits.chunk_indices,
        splits.first_items,
        splits.plan,
        splits.outputs,
        splits.lse,
        splits.arrivals,
        output,
        scale * 1.4426950408889634,
        queries.stride(0),
        output.stride(0),
        tables.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        padded=padded,
        group=group,
        block_size=block_size,
        tile=_TILE,
        precision="ieee" if queries.dtype == torch.float32 else "tf32",
        adds_up=adds_up,
        num_warps=warps,
        num_stages=stages if queries.dtype != torch.float32 else 2,
        **rounding_arguments(rows, output),
        **dependent_launch(),
    )
    if adds_up:
        return
    _combine_chunks[(len(contexts), heads)](
        contexts,
        splits.first_items,
        splits.plan,
        splits.outputs,
        splits.lse,
        output,
        output.stride(0),
        heads=heads,
        size=size,
        padded=padded,
        num_warps=1,
        **rounding_arguments(rows, output),
        **dependent_launch(),
    )


@triton.jit(
    do_not_specialize=["rounded_slots"], do_not_specialize_on_alignment=["slots", "contexts"]
)
def _decode_chunks(
    queries,
    keys,
    values,
    tables,
    slots,
    contexts,
    item_rows,
    item_chunks,
    first_items,
    plan,
    outputs,
    lse,
    arrivals,
    output,
    scale,
    query_stride,
    output_stride,
    table_stride,
    rounded,
    rounded_scales,
    rounded_slots,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
    adds_up: tl.constexpr,
    rounded_block: tl.constexpr,
    rounds: tl.constexpr,
    swizzled: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute the attention of one chunk. With `adds_up`, the last program of a row's chunks adds
    all of them up, in the order of the chunks, so that results do not depend on which one it is."""
    await_previous(overlaps)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(plan + 1):
        return
    group_size: tl.constexpr = heads // kv_heads
    row = tl.load(item_rows + item)
    chunk_length = tl.load(plan)
    first_item = tl.load(first_items + row)
    chunk_start = tl.load(item_chunks + item) * chunk_length
    context = tl.load(contexts + row)
    end = tl.minimum(chunk_start + chunk_length, context)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride

    group_head = tl.arange(0, group)
    dim = tl.arange(0, padded)
    position = tl.arange(0, tile)
    head = kv_head * group_size + group_head
    query_mask = (group_head < group_size)[:, None] & (dim < size)[None, :]
    query_offsets = row.to(tl.int64) * query_stride + head[:, None] * size + dim[None, :]
    query = tl.load(queries + query_offsets, mask=query_mask, other=0.0)

    m_i = tl.full([group], float("-inf"), tl.float32)
    l_i = tl.zeros([group], tl.float32)
    acc = tl.zeros([group, padded], tl.float32)
    for start in range(chunk_start, end, tile):
        in_chunk = start + position < end
        if block_size % tile == 0:  # a tile lies in one block
            block = tl.load(table + start // block_size).to(tl.int64)
            token = block * block_size + start % block_size + position
        else:
            positions = start + position
            block = tl.load(table + positions // block_size, mask=in_chunk, other=0).to(tl.int64)
            token = block * block_size + positions % block_size
        kv_offsets = (token * kv_heads + kv_head) * size
        kv_mask = in_chunk[None, :] & (dim < size)[:, None]
        key = tl.load(keys + kv_offsets[None, :] + dim[:, None], mask=kv_mask, other=0.0)
        score = tl.dot(query, key, input_precision=precision) * scale
        score = tl.where(in_chunk[None, :], score, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(score, 1))
        p = tl.exp2(score - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        kv_mask = in_chunk[:, None] & (dim < size)[None, :]
        value = tl.load(values + kv_offsets[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=precision)
        m_i = m_new
    result = acc / l_i[:, None]
    head_mask = group_head < group_size
    is_whole = context <= chunk_length  # the row's only chunk
    if not is_whole:
        partial_index = item.to(tl.int64) * heads + head
        tl.store(outputs + partial_index[:, None] * size + dim[None, :], result, mask=query_mask)
        tl.store(lse + partial_index, m_i + tl.log2(l_i), mask=head_mask)
        if adds_up:
            tl.debug_barrier()  # all threads have stored their part
            arrival = arrivals + row * kv_heads + kv_head
            chunks = tl.cdiv(context, chunk_length)
            is_whole = tl.atomic_add(arrival, 1, sem="acq_rel") == chunks - 1
            if is_whole:
                tl.store(arrival, 0)
                result = _add_chunks(
                    outputs, lse, first_item, chunks, head, head_mask, heads, size, group, padded
                )
    if is_whole:
        _store_result(
            result,
            row,
            head,
            head_mask,
            output,
            output_stride,
            rounded,
            rounded_scales,
            rounded_slots,
            heads,
            size,
            rounds,
            swizzled,
        )


@triton.jit(do_not_specialize=["rounded_slots"], do_not_specialize_on_alignment=["contexts"])
def _combine_chunks(
    contexts,
    first_items,
    plan,
    outputs,
    lse,
    output,
    output_stride,
    rounded,
    rounded_scales,
    rounded_slots,
    heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    rounded_block: tl.constexpr,
    rounds: tl.constexpr,
    swizzled: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Add up the chunks of one row and head, if it has more than one."""
    await_previous(overlaps)
    row = tl.program_id(0)
    context = tl.load(contexts + row)
    chunk_length = tl.load(plan)
    first_item = tl.load(first_items + row)
    if context <= chunk_length:
        return
    head = tl.program_id(1) + tl.arange(0, 1)
    head_mask = head < heads
    chunks = tl.cdiv(context, chunk_length)
    result = _add_chunks(outputs, lse, first_item, chunks, head, head_mask, heads, size, 1, padded)
    _store_result(
        result,
        row,
        head,
        head_mask,
        output,
        output_stride,
        rounded,
        rounded_scales,
        rounded_slots,
        heads,
        size,
        rounds,
        swizzled,
    )


@triton.jit
def _store_result(
    result,
    row,
    head,
    head_mask,
    output,
    output_stride,
    rounded,
    rounded_scales,
    rounded_slots,
    heads: tl.constexpr,
    size: tl.constexpr,
    rounds: tl.constexpr,
    swizzled: tl.constexpr,
):
    """Store the attention output of some heads of a row, (group, padded), in the output's dtype. If
    `rounds` is True, also store it in e4m3."""
    dim = tl.arange(0, result.shape[1])
    result = result.to(output.dtype.element_ty)
    offsets = row.to(tl.int64) * output_stride + head[:, None] * size + dim[None, :]
    tl.store(output + offsets, result, mask=head_mask[:, None] & (dim < size)[None, :])
    if rounds:
        store_rounded(
            result.to(tl.float32),
            head,
            head_mask,
            row,
            rounded,
            rounded_scales,
            rounded_slots,
            heads,
            swizzled,
        )


@triton.jit
def _add_chunks(
    outputs,
    lse,
    first_item,
    chunks,
    head,
    head_mask,
    heads: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    at_once: tl.constexpr = 4,
):
    """Return the attention output of a row, (group, padded), from those of its chunks."""
    dim = tl.arange(0, padded)
    m_i = tl.full([group], -1e38, tl.float32)
    l_i = tl.zeros([group], tl.float32)
    acc = tl.zeros([group, padded], tl.float32)
    for begin in range(0, chunks, at_once):
        for step in tl.static_range(at_once):  # loads of several chunks are in flight
            is_chunk = tl.where(head_mask, chunks - begin, 0) > step
            offset = (first_item + begin + step).to(tl.int64) * heads + head
            # Other programs have just written these: the L1 cache may have older values.
            chunk_lse = tl.load(
                lse + offset, mask=is_chunk, other=float("-inf"), cache_modifier=".cg"
            )
            chunk_output = tl.load(
                outputs + offset[:, None] * size + dim[None, :],
                mask=is_chunk[:, None] & (dim < size)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            m_new = tl.maximum(m_i, chunk_lse)
            alpha = tl.exp2(m_i - m_new)
            beta = tl.exp2(chunk_lse - m_new)
            acc = acc * alpha[:, None] + chunk_output * beta[:, None]
            l_i = l_i * alpha + beta
            m_i = m_new
    return acc / tl.where(head_mask, l_i, 1.0)[:, None]
