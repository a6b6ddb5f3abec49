"""Kernel for a mixture of experts with few tokens. Each expert's matrices are read once for all of
its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    EXPERTS,
    FLOAT32,
    INT32,
    exp,
    inlined,
    inlined_reordered,
    launch,
    like_of,
    narrow,
    serial_and_parallel,
    view,
    widen,
)
from nanoactor.models.devices.cpu.kernels.linear import _dot_four_rows, _dot_one_row
from nanoactor.models.weights.linear import DenseExperts


@inlined_reordered
def _silu_mul(gate, up):
    return gate / (np.float32(1) + exp(-gate)) * up


@inlined_reordered
def _activate(values, matrix, intermediate, begin, end, j, like):
    """Compute column j of `intermediate`, the values between the projections, for the rows of one
    expert, `begin` to `end` - 1."""
    inner = intermediate.shape[1]
    for row in range(begin, end - 3, 4):
        gates = _dot_four_rows(values, matrix, row, j)
        ups = _dot_four_rows(values, matrix, row, inner + j)
        for i in range(4):
            intermediate[row + i, j] = widen(narrow(_silu_mul(gates[i], ups[i]), like))
    for row in range(begin + (end - begin) // 4 * 4, end):
        gate, up = (
            _dot_one_row(values, matrix, row, j),
            _dot_one_row(values, matrix, row, inner + j),
        )
        intermediate[row, j] = widen(narrow(_silu_mul(gate, up), like))


@inlined_reordered
def _project_down(intermediate, matrix, pair_outputs, pairs, begin, end, j):
    """Compute output j of one expert for its rows, `begin` to `end` - 1, and store each result in
    the line of the row's pair."""
    for row in range(begin, end - 3, 4):
        outputs = _dot_four_rows(intermediate, matrix, row, j)
        for i in range(4):
            pair_outputs[pairs[row + i], j] = outputs[i]
    for row in range(begin + (end - begin) // 4 * 4, end):
        pair_outputs[pairs[row], j] = _dot_one_row(intermediate, matrix, row, j)


@inlined
def _gather_rows(source, pairs, top_k, values):
    for row in range(values.shape[0]):
        for i in range(values.shape[1]):
            values[row, i] = widen(source[pairs[row] // top_k, i])


@inlined
def _combine_experts(pair_outputs, topk_weights, token, results, like):
    """Sum the weighted expert outputs of one token, from the most to the least likely expert, so
    that the result does not depend on other tokens."""
    top_k = topk_weights.shape[1]
    for j in range(results.shape[1]):
        total = np.float32(0)
        for rank in range(top_k):
            total += topk_weights[token, rank] * pair_outputs[token * top_k + rank, j]
        results[token, j] = narrow(total, like)


@serial_and_parallel("aaaaaaaannnnnn", purpose=EXPERTS)
def _experts(
    x, gate_up, down, sorted_pairs, first_rows, routing, pair_products, output, tokens, top_k,
    experts, hidden, inner, parts, like
):  # fmt: skip
    """Run the experts for all token-expert pairs, which are sorted by expert and stored as tokens *
    top_k rows.

    `sorted_pairs`, int32 (rows,), is the index of each row's pair, and `first_rows`, int32 (experts
    + 1,), the first row of each expert. `routing` is the routing weights, float32 (tokens, top_k).
    The output of each pair is written to `pair_products`, float32 (rows, hidden), and the weighted
    sums to `output`, (tokens, hidden).

    Each thread computes one of `parts` ranges of the outputs of every matrix.
    """
    rows = tokens * top_k
    source, results = view(x, (tokens, hidden), like), view(output, (tokens, hidden), like)
    gate_up_matrices = view(gate_up, (experts, 2 * inner, hidden), like)
    down_matrices = view(down, (experts, hidden, inner), like)
    pairs, begins = view(sorted_pairs, (rows,), INT32), view(first_rows, (experts + 1,), INT32)
    topk_weights = view(routing, (tokens, top_k), FLOAT32)
    pair_outputs = view(pair_products, (rows, hidden), FLOAT32)
    values = np.empty((rows, hidden), np.float32)
    _gather_rows(source, pairs, top_k, values)
    intermediate = np.empty((rows, inner), np.float32)
    for part in prange(parts):
        for expert in range(experts):
            begin, end = begins[expert], begins[expert + 1]
            for j in range(part * inner // parts, (part + 1) * inner // parts):
                _activate(values, gate_up_matrices[expert], intermediate, begin, end, j, like)
    for part in prange(parts):
        for expert in range(experts):
            begin, end = begins[expert], begins[expert + 1]
            for j in range(part * hidden // parts, (part + 1) * hidden // parts):
                _project_down(
                    intermediate, down_matrices[expert], pair_outputs, pairs, begin, end, j
                )
    for part in prange(parts):
        for token in range(part * tokens // parts, (part + 1) * tokens // parts):
            _combine_experts(pair_outputs, topk_weights, token, results, like)


def _sort_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort token-expert pairs by expert. Return their order, int32 (pairs,), and the first row of
    each expert, int32 (experts + 1,)."""
    expert_ids = ids.flatten()
    first_rows = torch.zeros(experts + 1, dtype=torch.int32)
    torch.cumsum(expert_ids.bincount(minlength=experts), 0, out=first_rows[1:])
    return expert_ids.argsort(stable=True).int(), first_rows


def run_experts(
    kernel: Any,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    shape: torch.Size,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    threads: int,
    *extra_sizes: int,
) -> torch.Tensor:
    """Call an experts kernel with contiguous `matrices`, and return the result, (tokens, hidden).

    `shape` is (experts, hidden, inner). `extra_sizes` are passed to the kernel after the other
    sizes.
    """
    x, topk_weights, (tokens, top_k) = x.contiguous(), topk_weights.contiguous(), ids.shape
    experts, hidden, inner = shape
    sorted_pairs, first_rows = _sort_by_expert(ids, experts)
    y = torch.empty_like(x)
    pair_outputs = torch.empty(tokens * top_k, hidden)
    tensors = (x, *matrices, sorted_pairs, first_rows, topk_weights, pair_outputs, y)
    sizes = (tokens, top_k, experts, hidden, inner, *extra_sizes, threads)
    work = tokens * top_k * 3 * inner * hidden
    launch(kernel, threads, work, *(tensor.data_ptr() for tensor in tensors), *sizes, like_of(x))
    return y


def few_token_experts(
    x: torch.Tensor,
    weights: DenseExperts,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, (tokens, hidden), as an `ExpertsOperator`
    does. The matrices must be contiguous."""
    matrices = weights.gate_up, weights.down
    return run_experts(_experts, x, matrices, weights.down.shape, ids, topk_weights, threads)
