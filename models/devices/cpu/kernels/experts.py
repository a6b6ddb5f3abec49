"""Mixture of experts for a few tokens: each expert's matrices are read once for all of its
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    EXPERTS,
    FLOAT,
    INT32,
    both,
    exp,
    inlined,
    inlined_reordered,
    like_of,
    narrow,
    spread,
    view,
    wide,
)
from nanoactor.models.devices.cpu.kernels.linear import _four, _one
from nanoactor.models.weights.linear import DenseExperts


@inlined_reordered
def _swish(gate, up):
    return gate / (np.float32(1) + exp(-gate)) * up


@inlined_reordered
def _activate(values, matrix, between, begin, end, j, like):
    """Compute the j-th intermediate value (between the projections) for each of an expert's
    rows."""
    inner = between.shape[1]
    for row in range(begin, end - 3, 4):
        gates = _four(values, matrix, row, j)
        ups = _four(values, matrix, row, inner + j)
        for n in range(4):
            between[row + n, j] = wide(narrow(_swish(gates[n], ups[n]), like))
    for row in range(begin + (end - begin) // 4 * 4, end):
        gate, up = _one(values, matrix, row, j), _one(values, matrix, row, inner + j)
        between[row, j] = wide(narrow(_swish(gate, up), like))


@inlined_reordered
def _lead_back(between, matrix, found, choices, begin, end, j):
    """Compute the j-th output for each of an expert's rows."""
    for row in range(begin, end - 3, 4):
        four = _four(between, matrix, row, j)
        for n in range(4):
            found[choices[row + n], j] = four[n]
    for row in range(begin + (end - begin) // 4 * 4, end):
        found[choices[row], j] = _one(between, matrix, row, j)


@inlined
def _gather(source, choices, chosen, values):
    for row in range(values.shape[0]):
        for i in range(values.shape[1]):
            values[row, i] = wide(source[choices[row] // chosen, i])


@inlined
def _sum(found, weights, token, results, like):
    """Sum a token's weighted expert outputs in the order of its choices, so that the result does
    not depend on the rest of the step."""
    chosen = weights.shape[1]
    for j in range(results.shape[1]):
        total = np.float32(0)
        for choice in range(chosen):
            total += weights[token, choice] * found[token * chosen + choice, j]
        results[token, j] = narrow(total, like)


@both("aaaaaaaannnnnn", purpose=EXPERTS)
def _experts(
    x, gate_up, down, order, firsts, shares, products, output, tokens, chosen, experts, hidden,
    inner, parts, like
):  # fmt: skip
    """Compute rows (tokens * chosen) that are sorted by expert. `order`, int32 (rows,), holds the
    choice of each row, and `firsts`, int32 (experts + 1,), the first row of each expert. `products`
    is float32 (rows, hidden), and `output` is (tokens, hidden).

    Each thread computes one of `parts` ranges of the outputs of every matrix.
    """
    rows = tokens * chosen
    source, results = view(x, (tokens, hidden), like), view(output, (tokens, hidden), like)
    first_matrices = view(gate_up, (experts, 2 * inner, hidden), like)
    second_matrices = view(down, (experts, hidden, inner), like)
    choices, begins = view(order, (rows,), INT32), view(firsts, (experts + 1,), INT32)
    weights = view(shares, (tokens, chosen), FLOAT)
    found = view(products, (rows, hidden), FLOAT)
    values = np.empty((rows, hidden), np.float32)
    _gather(source, choices, chosen, values)
    between = np.empty((rows, inner), np.float32)
    for part in prange(parts):
        for expert in range(experts):
            begin, end = begins[expert], begins[expert + 1]
            for j in range(part * inner // parts, (part + 1) * inner // parts):
                _activate(values, first_matrices[expert], between, begin, end, j, like)
    for part in prange(parts):
        for expert in range(experts):
            begin, end = begins[expert], begins[expert + 1]
            for j in range(part * hidden // parts, (part + 1) * hidden // parts):
                _lead_back(between, second_matrices[expert], found, choices, begin, end, j)
    for part in prange(parts):
        for token in range(part * tokens // parts, (part + 1) * tokens // parts):
            _sum(found, weights, token, results, like)


def _grouped(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort choices by expert. Return their order, int32 (choices,), and the first row of each
    expert, int32 (experts + 1,)."""
    flat = ids.flatten()
    firsts = torch.zeros(experts + 1, dtype=torch.int32)
    torch.cumsum(flat.bincount(minlength=experts), 0, out=firsts[1:])
    return flat.argsort(stable=True).int(), firsts


def run_experts(
    kernel: Any,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    shape: torch.Size,
    ids: torch.Tensor,
    shares: torch.Tensor,
    threads: int,
    *more: int,
) -> torch.Tensor:
    """Call a kernel on contiguous `matrices`, and return (tokens, hidden). `shape` is (experts,
    hidden, inner); `more` is passed to the kernel after the sizes."""
    x, shares, (tokens, chosen) = x.contiguous(), shares.contiguous(), ids.shape
    experts, hidden, inner = shape
    order, firsts = _grouped(ids, experts)
    y = torch.empty_like(x)
    products = torch.empty(tokens * chosen, hidden)
    tensors = (x, *matrices, order, firsts, shares, products, y)
    sizes = (tokens, chosen, experts, hidden, inner, *more, threads)
    work = tokens * chosen * 3 * inner * hidden
    spread(kernel, threads, work, *(one.data_ptr() for one in tensors), *sizes, like_of(x))
    return y


def experts_of_few(
    x: torch.Tensor,
    weights: DenseExperts,
    ids: torch.Tensor,
    shares: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """Implement `Operators.experts` for contiguous matrices."""
    matrices = weights.gate_up, weights.down
    return run_experts(_experts, x, matrices, weights.down.shape, ids, shares, threads)
