"""Kernels for the operators between a layer's matrix products. Each is one pass over memory,
computed in float32."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import HeadTransform, KVCache
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

_TOKENS_PER_PROGRAM = ((16, 1), (64, 4), (math.inf, 8))
"""Pairs of a maximum number of tokens and the number of tokens that a program of
`norm_rotate_store` processes. Measured on an H200."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension. `x` must be contiguous.

    If `consumer` is an operator that needs rounded rows, it gets them.
    """
    output = torch.empty_like(x)
    if x.numel():
        _launch_norm(x, None, weight, eps, output, output, consumer)
    return output


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    consumer: Consumer = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMS norm of x + residual, x + residual). All tensors must be contiguous.

    If `consumer` is an operator that needs rounded rows, it gets them.
    """
    output, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _launch_norm(x, residual, weight, eps, output, total, consumer)
    return output, total


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    output: torch.Tensor,
    total: torch.Tensor,
    consumer: Consumer,
) -> None:
    size = x.shape[-1]
    rows = offer_rows(consumer, output) if x.dim() == 2 else None
    _rms_norm[(x.numel() // size,)](
        x,
        x if residual is None else residual,
        weight,
        output,
        total,
        eps,
        size=size,
        has_residual=residual is not None,
        **rounding_arguments(rows, x),
        **_row_config(size),
        **dependent_launch(),
    )


def _row_config(size: int) -> dict[str, int]:
    padded = triton.next_power_of_2(size)
    return {"padded": padded, "num_warps": min(16, max(1, padded // 256))}


@triton.jit(do_not_specialize=["rounded_slots"])
def _rms_norm(
    x,
    residual,
    weight,
    output,
    total,
    eps,
    rounded,
    rounded_scales,
    rounded_slots,
    size: tl.constexpr,
    padded: tl.constexpr,
    has_residual: tl.constexpr,
    rounded_block: tl.constexpr,
    rounds: tl.constexpr,
    swizzled: tl.constexpr,
    overlaps: tl.constexpr,
):
    column = tl.arange(0, padded)
    mask = column < size
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    await_previous(overlaps)
    row = tl.program_id(0).to(tl.int64)
    offsets = row * size + column
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if has_residual:
        value += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        # Rounded before it is normalized, because the rounded sum is what will be read again.
        value = value.to(total.dtype.element_ty)
        tl.store(total + offsets, value, mask=mask)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    normed = (value * scale * factor).to(output.dtype.element_ty)
    tl.store(output + offsets, normed, mask=mask)
    if rounds:
        count: tl.constexpr = padded // rounded_block
        block_index = tl.arange(0, count)
        store_rounded(
            tl.reshape(normed.to(tl.float32), [count, rounded_block]),
            block_index,
            block_index < size // rounded_block,
            row,
            rounded,
            rounded_scales,
            rounded_slots,
            size // rounded_block,
            swizzled,
        )


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half of the last dimension) * second half. `gate_up` must be contiguous."""
    inner = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if output.numel():
        block = min(1024, triton.next_power_of_2(inner))
        grid = (output.numel() // inner, triton.cdiv(inner, block))
        _swiglu[grid](gate_up, output, inner, block=block, num_warps=4, **dependent_launch())
    return output


@triton.jit
def _swiglu(gate_up, output, inner, block: tl.constexpr, overlaps: tl.constexpr):
    await_previous(overlaps)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=mask, other=0.0)
    exp_neg = tl.exp(-tl.abs(gate))  # never overflows
    sigmoid = tl.where(gate >= 0, 1.0, exp_neg) / (1.0 + exp_neg)
    value = gate * sigmoid * up.to(tl.float32)
    tl.store(output + row * inner + column, value.to(output.dtype.element_ty), mask=mask)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x`, (tokens, heads, head_dim), rotated by contiguous cosines and sines, (tokens,
    head_dim / 2). The heads of each token must be contiguous."""
    tokens, heads, size = x.shape
    output = x.new_empty(tokens, heads, size)
    if output.numel():
        _rotary[(tokens, triton.cdiv(heads, 8))](
            x,
            cos,
            sin,
            output,
            x.stride(0),
            heads,
            half=size // 2,
            padded=triton.next_power_of_2(size // 2),
            num_warps=2,
            **dependent_launch(),
        )
    return output


@triton.jit
def _rotary(
    x,
    cosines,
    sines,
    output,
    stride,
    heads,
    half: tl.constexpr,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
):
    await_previous(overlaps)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * 8 + tl.arange(0, 8)
    dim = tl.arange(0, padded)
    mask = (head < heads)[:, None] & (dim < half)[None, :]
    head_offsets = head[:, None] * (2 * half) + dim[None, :]
    offsets = token * stride + head_offsets
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + half, mask=mask, other=0.0).to(tl.float32)
    angle_offsets = token * half + dim
    cos = tl.load(cosines + angle_offsets, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + angle_offsets, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    dtype = output.dtype.element_ty
    offsets = token * heads * (2 * half) + head_offsets
    tl.store(output + offsets, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(output + offsets + half, (second * cos + first * sin).to(dtype), mask=mask)


def norm_rotate_store(
    qkv: torch.Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Normalize and rotate the query and key heads, store keys and values in the cache, and return
    the queries.

    `qkv` is (tokens, heads + 2 * kv_heads, head_dim), contiguous. Cosines and sines are (tokens,
    head_dim / 2). `slot_mapping` is int64 (tokens,).
    """
    tokens, all_heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    heads = all_heads - 2 * kv_heads
    queries = qkv.new_empty(tokens, heads, size)
    if tokens:
        tokens_per_program = next(count for most, count in _TOKENS_PER_PROGRAM if tokens <= most)
        _norm_rotate_store[(triton.cdiv(tokens, tokens_per_program), all_heads)](
            qkv,
            *(transform.norms or (qkv, qkv)),
            *transform.rotation,
            queries,
            cache.keys,
            cache.values,
            slot_mapping,
            transform.eps,
            tokens,
            heads=heads,
            kv_heads=kv_heads,
            half=size // 2,
            padded=triton.next_power_of_2(size // 2),
            tokens_per_program=tokens_per_program,
            has_norms=transform.norms is not None,
            num_warps=1 if tokens_per_program == 1 else 4,
            **dependent_launch(),
        )
    return queries


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slot_mapping"])
def _norm_rotate_store(
    qkv,
    q_weight,
    k_weight,
    cosines,
    sines,
    queries,
    keys,
    values,
    slot_mapping,
    eps,
    tokens,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    tokens_per_program: tl.constexpr,
    has_norms: tl.constexpr,
    overlaps: tl.constexpr,
):
    head = tl.program_id(1)
    dim = tl.arange(0, padded)
    if has_norms:
        weight = q_weight
        if head >= heads:
            weight = k_weight
        low = tl.load(weight + dim, mask=dim < half, other=0.0).to(tl.float32)
        high = tl.load(weight + half + dim, mask=dim < half, other=0.0).to(tl.float32)
    await_previous(overlaps)
    token = tl.program_id(0) * tokens_per_program + tl.arange(0, tokens_per_program)
    mask = (token < tokens)[:, None] & (dim < half)[None, :]
    token64 = token.to(tl.int64)
    # All loads come first, needed or not, so that a program waits for memory only once.
    cache_position = tl.load(slot_mapping + token, mask=token < tokens, other=0)
    offsets = (token64[:, None] * (heads + 2 * kv_heads) + head) * (2 * half) + dim[None, :]
    first = tl.load(qkv + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + offsets + half, mask=mask, other=0.0).to(tl.float32)
    angle_offsets = token64[:, None] * half + dim[None, :]
    cos = tl.load(cosines + angle_offsets, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sines + angle_offsets, mask=mask, other=0.0).to(tl.float32)
    dtype = queries.dtype.element_ty
    if head < heads + kv_heads:
        if has_norms:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
            first, second = first * scale * low[None, :], second * scale * high[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < heads:
        offsets = (token64[:, None] * heads + head) * (2 * half) + dim[None, :]
        tl.store(queries + offsets, first.to(dtype), mask=mask)
        tl.store(queries + offsets + half, second.to(dtype), mask=mask)
    else:
        # Attention reads whole blocks, then masks: a NaN in the cache would outlive its sequence.
        low_half, high_half = _finite_or_zero(first, dtype), _finite_or_zero(second, dtype)
        cached = keys
        kv_head = head - heads
        if head >= heads + kv_heads:
            cached = values
            kv_head = head - heads - kv_heads
        offsets = (cache_position[:, None] * kv_heads + kv_head) * (2 * half) + dim[None, :]
        tl.store(cached + offsets, low_half, mask=mask)
        tl.store(cached + offsets + half, high_half, mask=mask)


@triton.jit
def _finite_or_zero(value, dtype: tl.constexpr):
    rounded = value.to(dtype)
    return tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), rounded, 0.0)
