"""Causal attention of prompt chunks over the paged cache, in Triton. Each chunk attends to its
prefix and to itself.

This is flash attention (arXiv:2205.14135): scores stay in registers, and the sums are rescaled as
the maximum rises. A program processes some tokens of one row with all query heads that share one
key-value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import KVCache

_TILE, _WARPS, _STAGES = 64, 8, 2
_ROWS = 128
"""Number of rows of a program's matrix product: tokens, times query heads that share a key-value
head."""


def tokens_per_program(heads: int, kv_heads: int) -> int:
    """Return the number of tokens of one row that a program processes."""
    return max(1, _ROWS // triton.next_power_of_2(heads // kv_heads))


def prefill_attention(
    queries: torch.Tensor,
    cache: KVCache,
    tables: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Write the attention output of the tokens in `tiles` to `output`, which has the shape of
    `queries`, (tokens, heads, head_dim).

    `tables`, int32 (slots, blocks), contains block tables. `rows`, int32 (4, rows), contains the
    slot (index of the table), first token, number of tokens, and context length including the
    chunk. `tiles`, int32 (2, programs), contains the row of each program, or -1 if it has none, and
    the index of its group of `tokens_per_program` tokens.
    """
    heads, size = queries.shape[1:]
    kv_heads, block_size = cache.keys.shape[2], cache.keys.shape[1]
    exact = queries.dtype == torch.float32
    group = triton.next_power_of_2(heads // kv_heads)
    _prefill[(tiles.shape[1], kv_heads)](
        queries,
        cache.keys,
        cache.values,
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
        padded=max(16, triton.next_power_of_2(size)),
        group=group,
        tokens=tokens_per_program(heads, kv_heads),
        block_size=block_size,
        tile=32 if exact else _TILE,
        precision="ieee" if exact else "tf32",
        num_warps=_WARPS,
        num_stages=1 if exact else _STAGES,
    )


# These strides differ from step to step, and no prompt should wait for the compiler.
@triton.jit(
    do_not_specialize=["rows_stride", "tiles_stride"],
    do_not_specialize_on_alignment=["rows", "tiles"],
)
def _prefill(
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
    padded: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    group_size: tl.constexpr = heads // kv_heads
    kv_head = tl.program_id(1)
    row = tl.load(tiles + tl.program_id(0))
    if row < 0:
        return
    first_query = tl.load(tiles + tiles_stride + tl.program_id(0)) * tokens
    slot = tl.load(rows + row).to(tl.int64)
    first_token = tl.load(rows + rows_stride + row)
    count = tl.load(rows + 2 * rows_stride + row)
    context = tl.load(rows + 3 * rows_stride + row)
    table = tables + slot * table_stride

    query_index = tl.arange(0, tokens * group)
    token = first_query + query_index // group
    group_head = query_index % group
    head = kv_head * group_size + group_head
    dim = tl.arange(0, padded)
    row_mask = (token < count) & (group_head < group_size)
    query_mask = row_mask[:, None] & (dim < size)[None, :]
    token_offsets = (first_token + token).to(tl.int64)[:, None]
    query_offsets = token_offsets * query_stride + head[:, None] * size + dim[None, :]
    query = tl.load(queries + query_offsets, mask=query_mask, other=0.0)
    # The last position that a query sees is its own.
    query_positions = context - count + token

    m_i = tl.full([tokens * group], float("-inf"), tl.float32)
    l_i = tl.zeros([tokens * group], tl.float32)
    acc = tl.zeros([tokens * group, padded], tl.float32)
    position = tl.arange(0, tile)
    end = tl.minimum(context, context - count + first_query + tokens)
    # Tiles that are fully visible to all of the program's queries need no mask.
    unmasked_end = (context - count + first_query + 1) // tile * tile
    for start in range(0, unmasked_end, tile):
        if block_size % tile == 0:
            block = tl.load(table + start // block_size).to(tl.int64)
            cache_positions = block * block_size + start % block_size + position
        else:
            block = tl.load(table + (start + position) // block_size).to(tl.int64)
            cache_positions = block * block_size + (start + position) % block_size
        kv_offsets = (cache_positions * kv_heads + kv_head) * size
        key = tl.load(
            keys + kv_offsets[None, :] + dim[:, None], mask=(dim < size)[:, None], other=0.0
        )
        score = tl.dot(query, key, input_precision=precision) * scale
        m_new = tl.maximum(m_i, tl.max(score, 1))
        p = tl.exp2(score - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        value = tl.load(
            values + kv_offsets[:, None] + dim[None, :], mask=(dim < size)[None, :], other=0.0
        )
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=precision)
        m_i = m_new
    for start in range(unmasked_end, end, tile):
        in_context = start + position < end
        if block_size % tile == 0:
            block = tl.load(table + start // block_size).to(tl.int64)
            cache_positions = block * block_size + start % block_size + position
        else:
            block = tl.load(table + (start + position) // block_size, mask=in_context, other=0).to(
                tl.int64
            )
            cache_positions = block * block_size + (start + position) % block_size
        kv_offsets = (cache_positions * kv_heads + kv_head) * size
        kv_mask = in_context[None, :] & (dim < size)[:, None]
        key = tl.load(keys + kv_offsets[None, :] + dim[:, None], mask=kv_mask, other=0.0)
        score = tl.dot(query, key, input_precision=precision) * scale
        causal = start + position[None, :] <= query_positions[:, None]
        score = tl.where(causal & in_context[None, :], score, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(score, 1))
        # A query past the row's end may see nothing: keep its numbers finite.
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(score - m_finite[:, None])
        alpha = tl.exp2(m_i - m_finite)
        l_i = l_i * alpha + tl.sum(p, 1)
        kv_mask = in_context[:, None] & (dim < size)[None, :]
        value = tl.load(values + kv_offsets[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=precision)
        m_i = m_new
    result = acc / l_i[:, None]
    output_offsets = token_offsets * output_stride + head[:, None] * size + dim[None, :]
    tl.store(output + output_offsets, result.to(output.dtype.element_ty), mask=query_mask)
