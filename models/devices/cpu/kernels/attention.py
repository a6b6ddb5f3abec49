"""Attention of decode rows over the paged cache. Cache blocks are read in place, not copied."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices.cpu.kernels.elements import (
    INT32,
    exp,
    inlined,
    inlined_reordered,
    launch,
    like_of,
    narrow,
    prefetch,
    serial_and_parallel,
    view,
    widen,
)

_CACHE_LINE = 64
"""Size of a cache line in bytes."""
_MAX_PREFETCHED_BYTES = 16 << 10
"""Maximum size in bytes of a block's keys (or values) for which the next block is prefetched. For
larger blocks, the hardware prefetcher is enough."""


@inlined_reordered
def _prefetch_position(address, row_bytes, block_bytes):
    """Prefetch the keys (or values) at one position of the next block, for all heads. Do nothing
    for large blocks."""
    if block_bytes <= _MAX_PREFETCHED_BYTES:
        for line in range(0, row_bytes, _CACHE_LINE):
            prefetch(address + line)


@inlined_reordered
def _compute_scores(query, scores, block, group, start, count, next_block, kv_span):
    """Compute the scores of `query`, (heads, size), with the first `count` keys of a block.

    The scores are written to `scores`, (heads, context), from column `start` on, for the heads that
    share a KV head in the range `kv_span`.
    """
    row_bytes = block.shape[1] * block.shape[2] * block.itemsize
    for position in range(count):
        _prefetch_position(next_block + position * row_bytes, row_bytes, row_bytes * block.shape[0])
        for kv_head in range(kv_span[0], kv_span[1]):
            for head in range(kv_head * group, kv_head * group + group):
                score = np.float32(0)
                for i in range(block.shape[2]):
                    score += query[head, i] * widen(block[position, kv_head, i])
                scores[head, start + position] = score


@inlined_reordered
def _add_weighted_values(sums, scores, block, group, start, count, next_block, kv_span):
    """Add the values of one block, weighted by their scores, to `sums` (heads, size).

    Positions are added four at a time, so that each sum is loaded and stored only once per four
    positions.
    """
    row_bytes = block.shape[1] * block.shape[2] * block.itemsize
    for position in range(count):
        _prefetch_position(next_block + position * row_bytes, row_bytes, row_bytes * block.shape[0])
    fours = count // 4 * 4
    for position in range(0, fours, 4):
        column = start + position
        for kv_head in range(kv_span[0], kv_span[1]):
            for head in range(kv_head * group, kv_head * group + group):
                a, b = scores[head, column], scores[head, column + 1]
                c, d = scores[head, column + 2], scores[head, column + 3]
                for i in range(block.shape[2]):
                    sums[head, i] += (
                        a * widen(block[position, kv_head, i])
                        + b * widen(block[position + 1, kv_head, i])
                        + c * widen(block[position + 2, kv_head, i])
                        + d * widen(block[position + 3, kv_head, i])
                    )
    for position in range(fours, count):
        for kv_head in range(kv_span[0], kv_span[1]):
            for head in range(kv_head * group, kv_head * group + group):
                weight = scores[head, start + position]
                for i in range(block.shape[2]):
                    sums[head, i] += weight * widen(block[position, kv_head, i])


@inlined_reordered
def _softmax(scores, head, count):
    """Replace the scores of a head by e^(score - highest score), and return their sum. The caller
    must divide the weighted values by this sum."""
    highest = scores[head, 0]
    for i in range(count):
        highest = max(highest, scores[head, i])
    total = np.float32(0)
    for i in range(count):
        scores[head, i] = exp(scores[head, i] - highest)
        total += scores[head, i]
    return total


@inlined
def _attend(inputs, outputs, keys, values, blocks, context, row, kv_span, shape, scale, like):
    """Compute the attention output of one row for the KV heads in the range `kv_span`."""
    block_size, kv_heads, size = shape
    group = inputs.shape[1] // kv_heads
    heads = range(kv_span[0] * group, kv_span[1] * group)
    stride = block_size * kv_heads * size * inputs.itemsize
    last = (context - 1) // block_size
    query = np.empty((inputs.shape[1], size), np.float32)
    scores = np.empty((inputs.shape[1], context), np.float32)
    for head in heads:
        for i in range(size):
            query[head, i] = widen(inputs[row, head, i]) * np.float32(scale)
    for index in range(last + 1):
        start = index * block_size
        count = min(block_size, context - start)
        next_block = (
            keys + blocks[index + 1] * stride if index < last else values + blocks[0] * stride
        )
        block = view(keys + blocks[index] * stride, shape, like)
        _compute_scores(query, scores, block, group, start, count, next_block, kv_span)
    totals = np.empty(inputs.shape[1], np.float32)
    for head in heads:
        totals[head] = _softmax(scores, head, context)
    sums = query
    sums[:] = 0
    for index in range(last + 1):
        start = index * block_size
        count = min(block_size, context - start)
        next_block = values + blocks[min(index + 1, last)] * stride
        block = view(values + blocks[index] * stride, shape, like)
        _add_weighted_values(sums, scores, block, group, start, count, next_block, kv_span)
    for head in heads:
        for i in range(size):
            outputs[row, head, i] = narrow(sums[head, i] / totals[head], like)


@serial_and_parallel("aaaaaaannnnnnnf")
def _decode_attention(
    queries, keys, values, tables, slots, contexts, output, rows, heads, kv_heads, size, width,
    block_size, parts, scale, like
):  # fmt: skip
    """Compute the attention output of one query token per row, (rows, heads, size).

    `tables`, int32 (slots, width), is the block table of each slot. Keys and values are (blocks,
    block_size, kv_heads, size). `slots` and `contexts` are int32 (rows,). Each task processes one
    of `parts` ranges of a row's KV heads, so a thread reads contiguous memory.
    """
    inputs = view(queries, (rows, heads, size), like)
    outputs = view(output, (rows, heads, size), like)
    row_slots, context_lengths = view(slots, (rows,), INT32), view(contexts, (rows,), INT32)
    shape = block_size, kv_heads, size
    for task in prange(rows * parts):
        row, kv_part = task // parts, task % parts
        kv_span = kv_part * kv_heads // parts, (kv_part + 1) * kv_heads // parts
        blocks = view(tables + row_slots[row] * width * 4, (width,), INT32)
        context = context_lengths[row]
        _attend(inputs, outputs, keys, values, blocks, context, row, kv_span, shape, scale, like)


def decode_attention(
    queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float, threads: int
) -> torch.Tensor:
    """Return the attention output of decode rows, (rows, heads, head_dim), over their contexts."""
    queries = queries.contiguous()
    rows, heads, size = queries.shape
    _, block_size, kv_heads, _ = cache.keys.shape
    output = torch.empty_like(queries)
    launch(
        _decode_attention,
        threads,
        sum(batch.lengths.decode_contexts) * heads * size,
        queries.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        batch.tables.data_ptr(),
        batch.decode_slots.data_ptr(),
        batch.decode_contexts.data_ptr(),
        output.data_ptr(),
        rows,
        heads,
        kv_heads,
        size,
        batch.tables.stride(0),
        block_size,
        1 if rows >= threads else kv_heads,
        scale,
        like_of(queries),
    )
    return output
