"""Norms, rotary embedding and SwiGLU, one row at a time: each row is read and written once."""

from __future__ import annotations

import numpy as np
import torch

from nanoactor.models.batch import HeadTransform, KVCache
from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT,
    INT64,
    exp,
    finite,
    inlined,
    inlined_reordered,
    kernel,
    like_of,
    narrow,
    view,
    wide,
)


@inlined
def _inverse_root(squares, size, eps):
    return np.float32(1) / np.sqrt(squares / np.float32(size) + np.float32(eps))


@kernel("aaannf")
def _rms_norm(x, weight, output, rows, size, eps, like):
    """Compute x / sqrt(mean(x²) + eps) * weight for each row of (rows, size)."""
    inputs, weights = view(x, (rows, size), like), view(weight, (size,), like)
    outputs = view(output, (rows, size), like)
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            value = wide(inputs[row, i])
            squares += value * value
        scale = _inverse_root(squares, size, eps)
        for i in range(size):
            outputs[row, i] = narrow(wide(inputs[row, i]) * scale * wide(weights[i]), like)


@kernel("aaaaannf")
def _add_rms_norm(x, residual, weight, output, total, rows, size, eps, like):
    """Write x + residual, rounded, to `total`, and its norm to `output`; both are (rows, size)."""
    inputs, added = view(x, (rows, size), like), view(residual, (rows, size), like)
    weights = view(weight, (size,), like)
    outputs, totals = view(output, (rows, size), like), view(total, (rows, size), like)
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            rounded = narrow(wide(inputs[row, i]) + wide(added[row, i]), like)
            totals[row, i] = rounded
            squares += wide(rounded) * wide(rounded)
        scale = _inverse_root(squares, size, eps)
        for i in range(size):
            outputs[row, i] = narrow(wide(totals[row, i]) * scale * wide(weights[i]), like)


@kernel("aann")
def _swiglu(gate_up, output, rows, size, like):
    """Compute silu(first half) * second half: (rows, 2 * size) to (rows, size)."""
    inputs, outputs = view(gate_up, (rows, 2, size), like), view(output, (rows, size), like)
    for row in range(rows):
        for i in range(size):
            gate = wide(inputs[row, 0, i])
            silu = gate / (np.float32(1) + exp(-gate))
            outputs[row, i] = narrow(silu * wide(inputs[row, 1, i]), like)


@inlined_reordered
def _normed(vector, weights, eps):
    """Normalize a head's vector in place."""
    squares = np.float32(0)
    for i in range(len(vector)):
        squares += vector[i] * vector[i]
    scale = _inverse_root(squares, len(vector), eps)
    for i in range(len(vector)):
        vector[i] *= scale * wide(weights[i])


@inlined
def _rotate(vector, cosines, sines, token):
    """Rotate a head's vector in place: dimension i is paired with i + half."""
    half = len(vector) // 2
    for i in range(half):
        first, second = vector[i], vector[i + half]
        vector[i] = first * cosines[token, i] - second * sines[token, i]
        vector[i + half] = second * cosines[token, i] + first * sines[token, i]


@kernel("aaaaaaaaannnnf")
def _norm_rotate_store(
    qkv, q_norm, k_norm, cos, sin, slots, queries, keys, values, tokens, heads, kv_heads, size,
    eps, like
):  # fmt: skip
    """Rotate the query and key heads of `qkv`, (tokens, heads + 2 * kv_heads, size), after
    normalizing them if the norm weights have an address. Keys and values are written to the cache
    at `slots`, int64 (tokens,)."""
    inputs = view(qkv, (tokens, heads + 2 * kv_heads, size), like)
    cosines = view(cos, (tokens, size // 2), FLOAT)
    sines = view(sin, (tokens, size // 2), FLOAT)
    places, outputs = view(slots, (tokens,), INT64), view(queries, (tokens, heads, size), like)
    q_weights, k_weights = view(q_norm, (size,), like), view(k_norm, (size,), like)
    vector = np.empty(size, np.float32)
    for token in range(tokens):
        at = places[token] * kv_heads * size * inputs.itemsize
        stored_keys = view(keys + at, (kv_heads, size), like)
        stored_values = view(values + at, (kv_heads, size), like)
        for head in range(heads + kv_heads):
            for i in range(size):
                vector[i] = wide(inputs[token, head, i])
            if q_norm:
                _normed(vector, q_weights if head < heads else k_weights, eps)
            _rotate(vector, cosines, sines, token)
            for i in range(size):
                if head < heads:
                    outputs[token, head, i] = narrow(vector[i], like)
                else:
                    stored_keys[head - heads, i] = narrow(finite(vector[i]), like)
        for head in range(kv_heads):
            for i in range(size):
                value = finite(wide(inputs[token, heads + kv_heads + head, i]))
                stored_values[head, i] = narrow(value, like)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    x, size = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    at = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    _rms_norm(*at, x.numel() // size, size, eps, like_of(x))
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual)."""
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    y, total = torch.empty_like(x), torch.empty_like(x)
    at = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr(), total.data_ptr()
    _add_rms_norm(*at, x.numel() // size, size, eps, like_of(x))
    return y, total


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(first half of the last dimension) * second half."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], size))
    _swiglu(gate_up.data_ptr(), y.data_ptr(), y.numel() // size, size, like_of(y))
    return y


def takes_heads(qkv: torch.Tensor, how: HeadTransform) -> bool:
    """Return True if `norm_rotate_store` supports the layout: heads are rotated as a whole, and
    norm weights have the dtype of `qkv`."""
    whole = 2 * how.rotation[0].shape[-1] == qkv.shape[-1]
    return whole and (how.norms is None or how.norms[0].dtype == qkv.dtype)


def norm_rotate_store(
    qkv: torch.Tensor, how: HeadTransform, cache: KVCache, slots: torch.Tensor
) -> torch.Tensor:
    """Implement `Operators.norm_rotate_store`; cosines and sines must be contiguous and float32."""
    qkv = qkv.contiguous()
    tokens, heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    heads -= 2 * kv_heads
    queries = qkv.new_empty((tokens, heads, size))
    _norm_rotate_store(
        qkv.data_ptr(),
        *((0, 0) if how.norms is None else (weight.data_ptr() for weight in how.norms)),
        *(part.data_ptr() for part in how.rotation),
        slots.data_ptr(),
        queries.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        tokens,
        heads,
        kv_heads,
        size,
        how.eps,
        like_of(qkv),
    )
    return queries
