"""Kernel for a mixture of experts with few tokens and FP8 (e4m3) matrices, which are unpacked as
they are read."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT32,
    FP8_EXPERTS,
    INT32,
    inlined,
    narrow,
    serial_and_parallel,
    view,
    widen,
)
from nanoactor.models.devices.cpu.kernels.experts import (
    _combine_experts,
    _gather_rows,
    _silu_mul,
    run_experts,
)
from nanoactor.models.devices.cpu.kernels.fp8 import _compute_output, _copy_to_blocks
from nanoactor.models.weights.fp8 import Fp8Blocks


@inlined
def _lay_out(source, values, begin, end, offset):
    """Copy an expert's rows, `begin` to `end` - 1, to `values` as (blocks, rows, block), so that
    the inputs of each block are contiguous."""
    blocks, block = values.shape[1], values.shape[2]
    expert_values = view(
        values.ctypes.data + 4 * begin * blocks * block, (blocks, end - begin, block), FLOAT32
    )
    _copy_to_blocks(source[begin:end], expert_values, offset)
    expert_values[0, :, : block - offset] = expert_values[0, :, offset:].copy()


@inlined
def _expert_rows(values, begin, end):
    """Return a view of an expert's rows, `begin` to `end` - 1, which `_lay_out` has stored as
    (blocks, rows, block)."""
    blocks, block = values.shape[1], values.shape[2]
    return view(
        values.ctypes.data + 4 * begin * blocks * block, (blocks, end - begin, block), FLOAT32
    )


@inlined
def _activate(values, gate_up, factors, intermediate, begins, first, last, inputs, group, like):
    """Compute columns `first` to `last` - 1 of `intermediate`, the values between the projections,
    for every row of every expert."""
    inner = intermediate.shape[1]
    gates, ups = np.empty(len(intermediate), np.float32), np.empty(len(intermediate), np.float32)
    for expert in range(len(begins) - 1):
        begin, end = begins[expert], begins[expert + 1]
        if begin == end:
            continue
        expert_values, matrix_address = (
            _expert_rows(values, begin, end),
            gate_up + expert * 2 * inner * inputs,
        )
        for j in range(first, last):
            _compute_output(
                expert_values, matrix_address, factors[expert], gates, j, inputs, group, 0
            )
            _compute_output(
                expert_values, matrix_address, factors[expert], ups, inner + j, inputs, group, 0
            )
            for row in range(end - begin):
                intermediate[begin + row, j] = widen(narrow(_silu_mul(gates[row], ups[row]), like))


@inlined
def _project_down(
    values, down, factors, pair_outputs, pairs, begins, first, last, inputs, group, offset
):  # fmt: skip
    """Compute outputs `first` to `last` - 1 for every row of every expert."""
    outputs, sums = pair_outputs.shape[1], np.empty(len(pair_outputs), np.float32)
    for expert in range(len(begins) - 1):
        begin, end = begins[expert], begins[expert + 1]
        if begin == end:
            continue
        expert_values, matrix_address = (
            _expert_rows(values, begin, end),
            down + expert * outputs * inputs,
        )
        for j in range(first, last):
            _compute_output(
                expert_values, matrix_address, factors[expert], sums, j, inputs, group, offset
            )
            for row in range(end - begin):
                pair_outputs[pairs[begin + row], j] = sums[row]


@serial_and_parallel("aaaaaaaaaannnnnnnnnnnn", purpose=FP8_EXPERTS)
def _experts(
    x, gate_up, gate_up_scales, down, down_scales, sorted_pairs, first_rows, routing,
    pair_products, output, tokens, top_k, experts, hidden, inner, block,
    group, blocks, down_group, down_blocks, offset, parts, like,
):  # fmt: skip
    """Compute the same as `experts._experts` with e4m3 matrices.

    Scales are float32 (experts, groups, blocks). A group has `group` outputs (`down_group` for
    `down`). The inputs of `down` start at `offset` in their first block, and those of `gate_up` at
    the beginning of a block.
    """
    rows = tokens * top_k
    source, results = view(x, (tokens, hidden), like), view(output, (tokens, hidden), like)
    pairs, begins = view(sorted_pairs, (rows,), INT32), view(first_rows, (experts + 1,), INT32)
    topk_weights = view(routing, (tokens, top_k), FLOAT32)
    pair_outputs = view(pair_products, (rows, hidden), FLOAT32)
    groups, down_groups = (2 * inner + group - 1) // group, (hidden + down_group - 1) // down_group
    gate_up_factors = view(gate_up_scales, (experts, groups, blocks), FLOAT32)
    down_factors = view(down_scales, (experts, down_groups, down_blocks), FLOAT32)
    gathered = np.empty((rows, hidden), np.float32)
    _gather_rows(source, pairs, top_k, gathered)
    values = np.empty((rows, blocks, block), np.float32)
    for expert in range(experts):
        _lay_out(gathered, values, begins[expert], begins[expert + 1], 0)
    intermediate = np.empty((rows, inner), np.float32)
    for part in prange(parts):
        first, last = part * inner // parts, (part + 1) * inner // parts
        _activate(
            values, gate_up, gate_up_factors, intermediate, begins, first, last, hidden, group, like
        )
    values = np.empty((rows, down_blocks, block), np.float32)
    for expert in range(experts):
        _lay_out(intermediate, values, begins[expert], begins[expert + 1], offset)
    for part in prange(parts):
        first, last = part * hidden // parts, (part + 1) * hidden // parts
        _project_down(
            values,
            down,
            down_factors,
            pair_outputs,
            pairs,
            begins,
            first,
            last,
            inner,
            down_group,
            offset,
        )
    for part in prange(parts):
        for token in range(part * tokens // parts, (part + 1) * tokens // parts):
            _combine_experts(pair_outputs, topk_weights, token, results, like)


def few_token_fp8_experts(
    x: torch.Tensor,
    gate_up: Fp8Blocks,
    down: Fp8Blocks,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, (tokens, hidden), as an `ExpertsOperator`
    does. Both matrices must have blocks of the same size, and the offset of `gate_up` must be
    0."""
    return run_experts(
        _experts,
        x,
        (gate_up.weight, gate_up.scales, down.weight, down.scales),
        down.weight.shape,
        ids,
        topk_weights,
        threads,
        down.block,
        gate_up.group,
        gate_up.scales.shape[2],
        down.group,
        down.scales.shape[2],
        down.offset,
    )
