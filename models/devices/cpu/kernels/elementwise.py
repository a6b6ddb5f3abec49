"""Kernels for norms, rotary embedding, cache writes and SwiGLU. Each row is read and written
once."""

from __future__ import annotations

import numpy as np
import torch

from nanoactor.models.batch import HeadTransform, KVCache
from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT32,
    INT64,
    exp,
    finite_or_zero,
    inlined,
    inlined_reordered,
    kernel,
    like_of,
    narrow,
    view,
    widen,
)


@inlined
def _inverse_rms(squares, size, eps):
    return np.float32(1) / np.sqrt(squares / np.float32(size) + np.float32(eps))


@kernel("aaannf")
def _rms_norm(x, weight, output, rows, size, eps, like):
    """Compute x / sqrt(mean(x²) + eps) * weight for each row of `x`, (rows, size)."""
    inputs, weights = view(x, (rows, size), like), view(weight, (size,), like)
    outputs = view(output, (rows, size), like)
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            value = widen(inputs[row, i])
            squares += value * value
        scale = _inverse_rms(squares, size, eps)
        for i in range(size):
            outputs[row, i] = narrow(widen(inputs[row, i]) * scale * widen(weights[i]), like)


@kernel("aaaaannf")
def _add_rms_norm(x, residual, weight, output, total, rows, size, eps, like):
    """Write x + residual, rounded, to `total`, and its norm to `output`; both are (rows, size)."""
    inputs, residuals = view(x, (rows, size), like), view(residual, (rows, size), like)
    weights = view(weight, (size,), like)
    outputs, totals = view(output, (rows, size), like), view(total, (rows, size), like)
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            rounded = narrow(widen(inputs[row, i]) + widen(residuals[row, i]), like)
            totals[row, i] = rounded
            squares += widen(rounded) * widen(rounded)
        scale = _inverse_rms(squares, size, eps)
        for i in range(size):
            outputs[row, i] = narrow(widen(totals[row, i]) * scale * widen(weights[i]), like)


@kernel("aann")
def _swiglu(gate_up, output, rows, size, like):
    """Compute silu(first half) * second half of each row, from (rows, 2 * size) to (rows, size)."""
    inputs, outputs = view(gate_up, (rows, 2, size), like), view(output, (rows, size), like)
    for row in range(rows):
        for i in range(size):
            gate = widen(inputs[row, 0, i])
            silu = gate / (np.float32(1) + exp(-gate))
            outputs[row, i] = narrow(silu * widen(inputs[row, 1, i]), like)


@inlined_reordered
def _normalize(vector, weights, eps):
    """Normalize the vector of one head in place."""
    squares = np.float32(0)
    for i in range(len(vector)):
        squares += vector[i] * vector[i]
    scale = _inverse_rms(squares, len(vector), eps)
    for i in range(len(vector)):
        vector[i] *= scale * widen(weights[i])


@inlined
def _rotate(vector, cosines, sines, token):
    """Apply the rotary embedding of a token to the vector of one head in place. Dimension i is
    paired with i + half."""
    half = len(vector) // 2
    for i in range(half):
        first, second = vector[i], vector[i + half]
        vector[i] = first * cosines[token, i] - second * sines[token, i]
        vector[i + half] = second * cosines[token, i] + first * sines[token, i]


@kernel("aaaaaaaaannnnf")
def _norm_rotate_store(
    qkv, q_norm, k_norm, cos, sin, slot_mapping, queries, keys, values, tokens, heads, kv_heads,
    size, eps, like
):  # fmt: skip
    """Normalize and rotate the query and key heads of `qkv`, (tokens, heads + 2 * kv_heads, size),
    and write keys and values to the cache at `slot_mapping`, int64 (tokens,).

    If the addresses of the norm weights are null, heads are not normalized.
    """
    inputs = view(qkv, (tokens, heads + 2 * kv_heads, size), like)
    cosines = view(cos, (tokens, size // 2), FLOAT32)
    sines = view(sin, (tokens, size // 2), FLOAT32)
    cache_positions, outputs = (
        view(slot_mapping, (tokens,), INT64),
        view(queries, (tokens, heads, size), like),
    )
    q_weights, k_weights = view(q_norm, (size,), like), view(k_norm, (size,), like)
    vector = np.empty(size, np.float32)
    for token in range(tokens):
        offset = cache_positions[token] * kv_heads * size * inputs.itemsize
        stored_keys = view(keys + offset, (kv_heads, size), like)
        stored_values = view(values + offset, (kv_heads, size), like)
        for head in range(heads + kv_heads):
            for i in range(size):
                vector[i] = widen(inputs[token, head, i])
            if q_norm:
                _normalize(vector, q_weights if head < heads else k_weights, eps)
            _rotate(vector, cosines, sines, token)
            for i in range(size):
                if head < heads:
                    outputs[token, head, i] = narrow(vector[i], like)
                else:
                    stored_keys[head - heads, i] = narrow(finite_or_zero(vector[i]), like)
        for head in range(kv_heads):
            for i in range(size):
                value = finite_or_zero(widen(inputs[token, heads + kv_heads + head, i]))
                stored_values[head, i] = narrow(value, like)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    x, size = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    addresses = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    _rms_norm(*addresses, x.numel() // size, size, eps, like_of(x))
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of x + residual, x + residual)."""
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    y, total = torch.empty_like(x), torch.empty_like(x)
    addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr(), total.data_ptr()
    _add_rms_norm(*addresses, x.numel() // size, size, eps, like_of(x))
    return y, total


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half of the last dimension) * second half."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], size))
    _swiglu(gate_up.data_ptr(), y.data_ptr(), y.numel() // size, size, like_of(y))
    return y


def can_rotate_whole_heads(qkv: torch.Tensor, transform: HeadTransform) -> bool:
    """Return True if `norm_rotate_store` supports the layout: whole heads are rotated, and norm
    weights have the dtype of `qkv`."""
    rotates_whole_heads = 2 * transform.rotation[0].shape[-1] == qkv.shape[-1]
    return rotates_whole_heads and (
        transform.norms is None or transform.norms[0].dtype == qkv.dtype
    )


def norm_rotate_store(
    qkv: torch.Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Normalize, rotate and store heads, as specified by `Operators.norm_rotate_store`. Cosines and
    sines must be contiguous and float32."""
    qkv = qkv.contiguous()
    tokens, heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    heads -= 2 * kv_heads
    queries = qkv.new_empty((tokens, heads, size))
    _norm_rotate_store(
        qkv.data_ptr(),
        *((0, 0) if transform.norms is None else (weight.data_ptr() for weight in transform.norms)),
        *(part.data_ptr() for part in transform.rotation),
        slot_mapping.data_ptr(),
        queries.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        tokens,
        heads,
        kv_heads,
        size,
        transform.eps,
        like_of(qkv),
    )
    return queries
