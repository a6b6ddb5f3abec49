"""Attention of one new token per row over the paged cache, split along the context.

Contexts are cut into chunks, so that a few long rows occupy the whole chip as many short rows do
(flash-decoding: Dao et al., 2023). `plan_splits` assigns chunks to programs on the device, based on
the rows' lengths, once for all layers of a step, so a captured graph does not need the host. The
query heads that share a key-value head are the rows of one matrix product, so that keys and values
are read once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import KVCache

_TILE = 64
"""Number of positions that a program reads at a time; chunk lengths are multiples of it."""
_WHOLE_BLOCKS, _SMALL_BLOCKS = (4, 3), (2, 5)
"""(warps, pipeline stages) for a tile within one block, and for a tile gathered from several
blocks; measured on an H200 with bench/kernels.py."""
_MOST_CHUNKS = 1024
"""Maximum number of additional chunks for a step's rows, beyond one chunk per row; enough to keep
any chip busy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splits:
    """The chunks of a step's rows, and memory for their results."""

    rows: torch.Tensor
    """Row of each chunk, int32 (items,), in the order of rows."""
    numbers: torch.Tensor
    """Index of each chunk within its row, int32 (items,)."""
    firsts: torch.Tensor
    """First item of each row, int32 (rows,)."""
    plan: torch.Tensor
    """Number of positions in a chunk and number of items in use, int32 (2,)."""
    outputs: torch.Tensor
    """Attention output of each chunk, float32 (items, heads, head_dim)."""
    weights: torch.Tensor
    """Base-2 logarithm of each chunk's sum of exponentials, float32 (items, heads)."""

    @classmethod
    def empty(
        cls, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> Splits:
        """Allocate memory for `rows` rows."""
        items = rows + _wanted_chunks(rows, kv_heads, device)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            ints(items),
            ints(items),
            ints(rows),
            ints(2),
            torch.empty(items, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(items, heads, dtype=torch.float32, device=device),
        )

    def of(self, rows: int, kv_heads: int) -> Splits:
        """Return a view of the memory for fewer rows."""
        items = min(len(self.rows), rows + _wanted_chunks(rows, kv_heads, self.rows.device))
        return Splits(
            self.rows[:items],
            self.numbers[:items],
            self.firsts[:rows],
            self.plan,
            self.outputs[:items],
            self.weights[:items],
        )


def _wanted_chunks(rows: int, kv_heads: int, device: torch.device) -> int:
    """Return the number of additional chunks to aim for, beyond one chunk per row: enough for four
    waves of programs, or three per row."""
    processors = 1  # in the interpreter
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(-(-4 * processors // kv_heads), min(3 * rows, _MOST_CHUNKS))


def plan_splits(contexts: torch.Tensor, splits: Splits) -> None:
    """Cut contexts, int32 (rows,), into chunks of equal length, as many as `splits` has room
    for."""
    rows = len(contexts)
    _plan_splits[(1,)](
        contexts,
        splits.rows,
        splits.numbers,
        splits.firsts,
        splits.plan,
        rows,
        len(splits.rows) - rows,
        tile=_TILE,
        block=triton.next_power_of_2(rows),
        num_warps=4 if rows <= 512 else 8,
    )


@triton.jit(do_not_specialize=["rows", "wanted"])
def _plan_splits(
    contexts,
    item_rows,
    item_numbers,
    firsts,
    plan,
    rows,
    wanted,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.arange(0, block)
    context = tl.load(contexts + row, mask=row < rows, other=0)
    # Rounding up adds less than one chunk per row, so rows + wanted items suffice.
    total = tl.sum(tl.cdiv(context, tile), 0)
    chunk = tl.maximum(tl.cdiv(total, wanted), 1) * tile
    counts = tl.cdiv(context, chunk)
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    tl.store(firsts + row, begins, mask=row < rows)
    tl.store(plan, chunk)
    tl.store(plan + 1, tl.sum(counts, 0))
    for number in range(tl.max(counts, 0)):
        there = number < counts
        tl.store(item_rows + begins + number, row, mask=there)
        tl.store(item_numbers + begins + number, number + row * 0, mask=there)


def decode_attention(
    queries: torch.Tensor,
    cache: KVCache,
    tables: torch.Tensor,
    slots: torch.Tensor,
    contexts: torch.Tensor,
    splits: Splits,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Write the attention of `queries`, (rows, heads, head_dim), to `output`, which has the same
    shape.

    `tables` is int32 (slots, blocks). `slots` and `contexts`, int32 (rows,), hold each sequence's
    row in the tables and its length, new token included. `plan_splits` must have run for these
    contexts.
    """
    rows, heads, size = queries.shape
    kv_heads, block_size = cache.keys.shape[2], cache.keys.shape[1]
    padded = max(16, triton.next_power_of_2(size))
    warps, stages = _SMALL_BLOCKS if block_size % _TILE else _WHOLE_BLOCKS
    _decode_chunks[(kv_heads, len(splits.rows))](
        queries,
        cache.keys,
        cache.values,
        tables,
        slots,
        contexts,
        splits.rows,
        splits.numbers,
        splits.firsts,
        splits.plan,
        splits.outputs,
        splits.weights,
        output,
        scale * 1.4426950408889634,
        queries.stride(0),
        output.stride(0),
        tables.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        padded=padded,
        group=max(16, triton.next_power_of_2(heads // kv_heads)),
        block_size=block_size,
        tile=_TILE,
        precision="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages if queries.dtype != torch.float32 else 2,
    )
    _combine_chunks[(rows, heads)](
        contexts,
        splits.firsts,
        splits.plan,
        splits.outputs,
        splits.weights,
        output,
        output.stride(0),
        heads=heads,
        size=size,
        padded=padded,
        num_warps=1,
    )


@triton.jit
def _decode_chunks(
    queries,
    keys,
    values,
    tables,
    slots,
    contexts,
    item_rows,
    item_numbers,
    firsts,
    plan,
    outputs,
    weights,
    output,
    scale,
    query_stride,
    output_stride,
    table_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(plan + 1):
        return
    each: tl.constexpr = heads // kv_heads
    row = tl.load(item_rows + item)
    chunk = tl.load(plan)
    first = tl.load(item_numbers + item) * chunk
    context = tl.load(contexts + row)
    end = tl.minimum(first + chunk, context)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride

    member = tl.arange(0, group)
    dim = tl.arange(0, padded)
    position = tl.arange(0, tile)
    head = kv_head * each + member
    wanted = (member < each)[:, None] & (dim < size)[None, :]
    at = row.to(tl.int64) * query_stride + head[:, None] * size + dim[None, :]
    query = tl.load(queries + at, mask=wanted, other=0.0)

    best = tl.full([group], float("-inf"), tl.float32)
    total = tl.zeros([group], tl.float32)
    sums = tl.zeros([group, padded], tl.float32)
    for begin in range(first, end, tile):
        inside = begin + position < end
        if block_size % tile == 0:  # a tile lies in one block
            block = tl.load(table + begin // block_size).to(tl.int64)
            token = block * block_size + begin % block_size + position
        else:
            where = begin + position
            block = tl.load(table + where // block_size, mask=inside, other=0).to(tl.int64)
            token = block * block_size + where % block_size
        place = (token * kv_heads + kv_head) * size
        valid = inside[None, :] & (dim < size)[:, None]
        key = tl.load(keys + place[None, :] + dim[:, None], mask=valid, other=0.0)
        score = tl.dot(query, key, input_precision=precision) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(share, 1)
        valid = inside[:, None] & (dim < size)[None, :]
        value = tl.load(values + place[:, None] + dim[None, :], mask=valid, other=0.0)
        sums = sums * fade[:, None]
        sums = tl.dot(share.to(value.dtype), value, sums, input_precision=precision)
        best = higher
    result = sums / total[:, None]
    if context <= chunk:  # the row's only chunk
        to = row.to(tl.int64) * output_stride + head[:, None] * size + dim[None, :]
        tl.store(output + to, result.to(output.dtype.element_ty), mask=wanted)
    else:
        part = item.to(tl.int64) * heads + head
        tl.store(outputs + part[:, None] * size + dim[None, :], result, mask=wanted)
        tl.store(weights + part, best + tl.log2(total), mask=member < each)


@triton.jit
def _combine_chunks(
    contexts,
    firsts,
    plan,
    outputs,
    weights,
    output,
    output_stride,
    heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(contexts + row)
    chunk = tl.load(plan)
    if context <= chunk:
        return
    item = tl.load(firsts + row)
    dim = tl.arange(0, padded)
    best = float("-inf")
    total = 0.0
    sums = tl.zeros([padded], tl.float32)
    for number in range(tl.cdiv(context, chunk)):
        at = (item + number).to(tl.int64) * heads + head
        weight = tl.load(weights + at)
        part = tl.load(outputs + at * size + dim, mask=dim < size, other=0.0)
        higher = tl.maximum(best, weight)
        fade = tl.exp2(best - higher)
        share = tl.exp2(weight - higher)
        sums = sums * fade + part * share
        total = total * fade + share
        best = higher
    at = row.to(tl.int64) * output_stride + head * size + dim
    tl.store(output + at, (sums / total).to(output.dtype.element_ty), mask=dim < size)
