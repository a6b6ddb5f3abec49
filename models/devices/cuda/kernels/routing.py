"""Top-k routing in Triton, and the grouping of token-expert pairs into blocks of one expert each.

Nothing is read back to the host, so steps of any size can be captured. A grid covers the maximum
number of blocks, and programs of empty blocks return at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.weights.linear import Router

_LOGITS_CONFIGS = ((4, (1, 2048, 8)), (32, (4, 2048, 8)), (128, (8, 512, 4)))
"""Pairs of a maximum number of tokens and a configuration: the number of tokens per program, which
share each read of the router's weights, the number of inputs that are read at a time, and the
number of warps. With more tokens, cuBLAS computes the router logits. Measured on an H200."""
_MIN_SPLIT_TOKENS, _MAX_SPLIT_TOKENS, _MAX_FLOAT16_SPLIT_TOKENS = 33, 192, 2048
"""Minimum and maximum numbers of 16-bit tokens for which our kernel on tensor cores is faster than
that in float32, and than cuBLAS: on tensor cores for bfloat16, in float32 for float16."""
_SPLIT_TOKENS, _SPLIT_INPUTS = 32, 64
"""Number of tokens per program, and number of inputs that are read at a time, on tensor cores."""
_MAX_PARTS, _MAX_SPLIT_EXPERTS = 4096, 256
"""Maximum number of parts of a token's logits, and of experts, on tensor cores."""
_SPLIT_PARTS = 3
"""Number of bfloat16 numbers whose sum is a float32 number."""
_PAIR_CHUNKS = (256, 512, 1024, 2048)
"""Numbers of pairs that a program can read at a time. If none of them suffices, several programs
read `_SHARED_CHUNK` pairs each."""
_SHARED_CHUNK = 4096
_CHUNKS_AT_ONCE = 8
"""Number of chunks of pairs whose counts are read at a time."""
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of each token's experts and their routing weights, as specified by
    `Operators.route`. The weights are rounded to the dtype of `x`."""
    tokens, experts, top_k = len(x), len(router.weight), router.top_k
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    if not tokens:
        return ids, topk_weights
    logits = _router_logits(x.contiguous(), router.weight)
    _select_experts[(tokens,)](
        logits,
        ids,
        topk_weights,
        tokens,
        experts,
        are_interleaved=not logits.is_contiguous(),
        splits=len(logits),
        padded_splits=triton.next_power_of_2(len(logits)),
        top_k=top_k,
        renormalize=router.renormalize,
        padded=triton.next_power_of_2(experts),
        padded_k=triton.next_power_of_2(top_k),
        dtype=_TRITON_DTYPES[x.dtype],
        num_warps=1,
        **dependent_launch(),
    )
    return ids, topk_weights


def _router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return parts of the router logits, float32 (splits, tokens, experts). The logits are their
    sums over splits. The memory layout may be (tokens, splits, experts)."""
    (tokens, hidden), experts = x.shape, len(weight)
    config = next((config for most, config in _LOGITS_CONFIGS if tokens <= most), None)
    is_float16 = x.dtype == torch.float16
    max_split_tokens = _MAX_FLOAT16_SPLIT_TOKENS if is_float16 else _MAX_SPLIT_TOKENS
    if (
        x.dtype != torch.float32
        and _MIN_SPLIT_TOKENS <= tokens <= max_split_tokens
        and experts <= _MAX_SPLIT_EXPERTS
    ):
        padded = max(16, triton.next_power_of_2(experts))
        inputs = _SPLIT_INPUTS * triton.cdiv(hidden, _SPLIT_INPUTS * (_MAX_PARTS // padded))
        splits = triton.cdiv(hidden, inputs)
        logits = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
        _compute_logit_parts[(triton.cdiv(tokens, _SPLIT_TOKENS), splits)](
            x,
            weight,
            logits,
            tokens,
            hidden=hidden,
            experts=experts,
            rows=_SPLIT_TOKENS,
            padded=padded,
            inputs=inputs,
            tile=_SPLIT_INPUTS,
            num_warps=8 if tokens <= 64 else 4,
            **dependent_launch(),
        )
    elif config is not None:
        rows, inputs, warps = config
        logits = torch.empty(1, tokens, experts, dtype=torch.float32, device=x.device)
        _compute_router_logits[(triton.cdiv(tokens, rows), triton.cdiv(experts, 4))](
            x,
            weight,
            logits,
            tokens,
            hidden=hidden,
            experts=experts,
            rows=rows,
            outputs=4,
            inputs=min(inputs, triton.next_power_of_2(hidden)),
            num_warps=warps,
            **dependent_launch(),
        )
    elif x.dtype == torch.bfloat16:
        logits = _multiply_parts(x, weight)
    else:
        logits = torch.mm(x.float(), weight.t())[None]
    return logits


def _multiply_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the products of bfloat16 tokens with the parts of float32 weights, float32 (parts,
    tokens, experts). As in `_compute_logit_parts`, only their sums are rounded."""
    experts, hidden = weight.shape
    parts = torch.empty(_SPLIT_PARTS * experts, hidden, dtype=x.dtype, device=x.device)
    block = 1024
    _split_weights[(triton.cdiv(weight.numel(), block),)](
        weight, parts, count=weight.numel(), parts=_SPLIT_PARTS, block=block, **dependent_launch()
    )
    if x.is_cuda:
        logits = torch.mm(x, parts.t(), out_dtype=torch.float32)
    else:  # in the interpreter
        logits = torch.mm(x.float(), parts.t().float())
    return logits.view(-1, _SPLIT_PARTS, experts).transpose(0, 1)


@triton.jit
def _split_weights(
    weight,
    split,
    count: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Write float32 weights as sums of `parts` bfloat16 numbers."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    rest = tl.load(weight + i, mask=i < count, other=0.0)
    await_previous(overlaps)
    for n in tl.static_range(parts):
        part = rest.to(tl.bfloat16)
        tl.store(split + n * count + i, part, mask=i < count)
        rest -= part.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _compute_logit_parts(
    x,
    weight,
    logits,
    tokens,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    rows: tl.constexpr,
    padded: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute the part of the router logits that comes from `inputs` inputs, on tensor cores.

    Numbers of 16 bits are exact in TF32, and a float32 weight is the sum of three bfloat16 numbers,
    so all products are exact. The tensor cores of an H200 add them up with about three times the
    error of float32.
    """
    expert = tl.arange(0, padded)
    expert_mask = (expert < experts)[None, :]
    split = tl.program_id(1)
    i = split * inputs + tl.arange(0, tile)
    weights = weight + expert[None, :] * hidden
    rest = tl.load(weights + i[:, None], mask=(i < hidden)[:, None] & expert_mask, other=0.0)
    await_previous(overlaps)
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    token_mask = (token < tokens)[:, None]
    total = tl.zeros([rows, padded], tl.float32)
    for begin in tl.static_range(0, inputs, tile):
        i = split * inputs + begin + tl.arange(0, tile)
        mask = token_mask & (i < hidden)[None, :]
        offsets = token.to(tl.int64)[:, None] * hidden + i[None, :]
        values = tl.load(x + offsets, mask=mask, other=0.0)
        if begin > 0:
            mask = (i < hidden)[:, None] & expert_mask
            rest = tl.load(weights + i[:, None], mask=mask, other=0.0)
        for _ in tl.static_range(3):
            part = rest.to(tl.bfloat16).to(tl.float32)
            total = tl.dot(values.to(tl.float32), part, total, input_precision="tf32")
            rest -= part
    offsets = (split * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(logits + offsets, total, mask=token_mask & expert_mask)


@triton.jit(do_not_specialize=["tokens"])
def _compute_router_logits(
    x,
    weight,
    logits,
    tokens,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute the router logits of `rows` tokens, in float32, for some of the experts."""
    await_previous(overlaps)
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    token_offsets = token.to(tl.int64)[:, None]
    token_mask = (token < tokens)[:, None]
    j = tl.program_id(1) * outputs + tl.arange(0, outputs)
    products = tl.zeros([rows, outputs, inputs], tl.float32)
    for begin in range(0, hidden, inputs):
        i = begin + tl.arange(0, inputs)
        mask = token_mask & (i < hidden)[None, :]
        values = tl.load(x + token_offsets * hidden + i[None, :], mask=mask, other=0.0)
        mask = (j < experts)[:, None] & (i < hidden)[None, :]
        loaded = tl.load(weight + j[:, None] * hidden + i[None, :], mask=mask, other=0.0)
        products += loaded[None, :, :] * values.to(tl.float32)[:, None, :]
    mask = token_mask & (j < experts)[None, :]
    tl.store(logits + token_offsets * experts + j[None, :], tl.sum(products, 2), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _select_experts(
    logits,
    ids,
    topk_weights,
    tokens,
    experts,
    are_interleaved: tl.constexpr,
    splits: tl.constexpr,
    padded_splits: tl.constexpr,
    top_k: tl.constexpr,
    renormalize: tl.constexpr,
    padded: tl.constexpr,
    padded_k: tl.constexpr,
    dtype: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Choose one token's most likely experts and compute their softmax weights. Of equal
    probabilities, the lower id wins."""
    await_previous(overlaps)
    token = tl.program_id(0)
    expert = tl.arange(0, padded)
    mask = expert < experts
    split = tl.arange(0, padded_splits)
    row = token.to(tl.int64) * splits + split if are_interleaved else split * tokens + token
    offsets = row[:, None] * experts + expert[None, :]
    parts_mask = (split < splits)[:, None] & mask[None, :]
    router_logits = tl.sum(tl.load(logits + offsets, mask=parts_mask, other=0.0), 0)
    router_logits = tl.where(mask, router_logits, float("-inf"))
    probabilities = tl.exp(router_logits - tl.max(router_logits, 0))
    probabilities = probabilities / tl.sum(probabilities, 0)
    # Bits of floats that are not negative have the order of the floats. A warp finds the largest
    # integer with one instruction, but needs ten for a float.
    keys = tl.where(mask, probabilities.to(tl.int32, bitcast=True), -1)
    rank = tl.arange(0, padded_k)
    selected = tl.zeros([padded_k], tl.int32)
    values = tl.zeros([padded_k], tl.int32)
    for k in tl.static_range(top_k):
        largest = tl.max(keys, 0)
        winner = tl.min(tl.where(keys == largest, expert, padded - 1), 0)
        selected = tl.where(rank == k, winner, selected)
        values = tl.where(rank == k, largest, values)
        keys = tl.where(expert == winner, -2, keys)
    values = values.to(tl.float32, bitcast=True)
    if renormalize:
        values = values / tl.sum(tl.where(rank < top_k, values, 0.0), 0)
    tl.store(ids + token * top_k + rank, tl.minimum(selected, experts - 1), mask=rank < top_k)
    values = values.to(dtype).to(tl.float32)
    tl.store(topk_weights + token * top_k + rank, values, mask=rank < top_k)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Token-expert pairs in blocks of one expert each. Within an expert, pairs are in the order of
    tokens."""

    pair_ids: torch.Tensor
    """Pair of each row, int32 (blocks * size,). If a row has none, this is the number of pairs."""
    expert_ids: torch.Tensor
    """Expert of each block, int32 (blocks,). -1 for unused blocks, which come last."""
    num_used: torch.Tensor
    """Number of blocks that have an expert, int32 (1,)."""


def align_blocks(ids: torch.Tensor, experts: int, size: int) -> Blocks:
    """Return the token-expert pairs in `ids`, int32 (tokens, top_k), grouped into blocks of `size`
    rows."""
    pairs = ids.numel()
    blocks = min(pairs, experts + pairs // size)
    pair_ids = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(blocks + 1, dtype=torch.int32, device=ids.device)
    padded = triton.next_power_of_2(experts + 1)
    chunk = next((chunk for chunk in _PAIR_CHUNKS if pairs <= chunk), None)
    is_shared, chunk = chunk is None, chunk or _SHARED_CHUNK
    chunks = triton.cdiv(pairs, chunk)
    places = None
    if is_shared:
        counts = torch.empty(chunks, padded, dtype=torch.int32, device=ids.device)
        places = torch.empty(experts, chunks, dtype=torch.int32, device=ids.device)
        _count_pairs[(chunks,)](
            ids, counts, pairs, experts=experts, padded=padded, chunk=chunk, **dependent_launch()
        )
    else:
        counts = ids
    _align_blocks[(experts,)](
        counts,
        pair_ids,
        expert_ids,
        places,
        pairs,
        blocks,
        chunks,
        experts=experts,
        padded=padded,
        size=size,
        chunk=chunk,
        at_once=_CHUNKS_AT_ONCE,
        num_warps=8,
        **dependent_launch(),
    )
    if is_shared:
        _place_pairs[(experts, chunks)](
            ids, places, pair_ids, pairs, chunks, chunk=chunk, **dependent_launch()
        )
    return Blocks(pair_ids, expert_ids[:-1], expert_ids[-1:])


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs(
    ids,
    counts,
    pairs,
    experts: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Count each expert's pairs in a chunk of them, and write the counts, int32 (chunks,
    padded)."""
    await_previous(overlaps)
    pair = tl.program_id(0) * chunk + tl.arange(0, chunk)
    pair_experts = tl.load(ids + pair, mask=pair < pairs, other=experts)
    offsets = tl.program_id(0) * padded + tl.arange(0, padded)
    tl.store(counts + offsets, tl.histogram(pair_experts, padded))


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place_pairs(ids, places, pair_ids, pairs, chunks, chunk: tl.constexpr, overlaps: tl.constexpr):
    """Write an expert's pairs in a chunk to its blocks, from the place in `places`, int32 (experts,
    chunks), on."""
    await_previous(overlaps)
    own_expert, own_chunk = tl.program_id(0), tl.program_id(1)
    pair = own_chunk * chunk + tl.arange(0, chunk)
    is_own = (tl.load(ids + pair, mask=pair < pairs, other=-1) == own_expert).to(tl.int32)
    place = tl.load(places + own_expert * chunks + own_chunk) + tl.cumsum(is_own, 0) - 1
    tl.store(pair_ids + place, pair, mask=is_own > 0)


@triton.jit(do_not_specialize=["pairs", "blocks", "chunks"])
def _align_blocks(
    source,
    pair_ids,
    expert_ids,
    places,
    pairs,
    blocks,
    chunks,
    experts: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    at_once: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Write the pairs of one expert, in order, to its own blocks, and fill the rest of the last
    block with `pairs`.

    If `places` is None, `source` contains the ids of the experts of up to `chunk` pairs. Otherwise,
    it contains counts, int32 (chunks, padded), and only the place of the expert's first pair of
    each chunk is written, to `places`, int32 (experts, chunks).

    The expert of unused blocks is -1. The number of used blocks is stored after the experts.
    """
    await_previous(overlaps)
    own_expert = tl.program_id(0)
    expert = tl.arange(0, padded)
    if places is None:
        pair = tl.arange(0, chunk)
        pair_experts = tl.load(source + pair, mask=pair < pairs, other=experts)
        counts = tl.histogram(pair_experts, padded)
    else:
        counts = tl.zeros([padded], tl.int32)
        for begin in range(0, chunks, at_once):
            one = begin + tl.arange(0, at_once)
            offsets = one[:, None] * padded + expert[None, :]
            counts += tl.sum(tl.load(source + offsets, mask=(one < chunks)[:, None], other=0), 0)
    block_counts = (counts + size - 1) // size
    first_block = tl.sum(tl.where(expert < own_expert, block_counts, 0), 0)
    own_blocks = tl.sum(tl.where(expert == own_expert, block_counts, 0), 0)
    own_pairs = tl.sum(tl.where(expert == own_expert, counts, 0), 0)
    if places is None:
        is_own = (pair_experts == own_expert).to(tl.int32)
        place = first_block * size + tl.cumsum(is_own, 0) - 1
        tl.store(pair_ids + place, pair, mask=is_own > 0)
    else:
        place = first_block * size
        for one in range(chunks):
            tl.store(places + own_expert * chunks + one, place)
            place += tl.load(source + one * padded + own_expert)
    rest = own_pairs + tl.arange(0, size)
    tl.store(
        pair_ids + first_block * size + rest,
        tl.zeros([size], tl.int32) + pairs,
        mask=rest < own_blocks * size,
    )
    for begin in range(0, own_blocks, size):
        block_index = begin + tl.arange(0, size)
        tl.store(
            expert_ids + first_block + block_index,
            tl.zeros([size], tl.int32) + own_expert,
            mask=block_index < own_blocks,
        )
    if own_expert == experts - 1:
        tl.store(expert_ids + blocks, first_block + own_blocks)
        for begin in range(first_block + own_blocks, blocks, size):
            block_index = begin + tl.arange(0, size)
            tl.store(
                expert_ids + block_index, tl.zeros([size], tl.int32) - 1, mask=block_index < blocks
            )
