"""Mixture of experts for a few tokens, with e4m3 matrices that are unpacked as they are read."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT,
    FP8_EXPERTS,
    INT32,
    both,
    inlined,
    narrow,
    view,
    wide,
)
from nanoactor.models.devices.cpu.kernels.experts import _gather, _sum, _swish, run_experts
from nanoactor.models.devices.cpu.kernels.fp8 import _in_blocks, _totals
from nanoactor.models.weights.fp8 import Fp8Blocks


@inlined
def _lay_out(source, values, begin, end, offset):
    """Copy an expert's rows of inputs into the block layout that `_totals` reads."""
    blocks, block = values.shape[1], values.shape[2]
    own = view(values.ctypes.data + 4 * begin * blocks * block, (blocks, end - begin, block), FLOAT)
    _in_blocks(source[begin:end], own, offset)
    own[0, :, : block - offset] = own[0, :, offset:].copy()


@inlined
def _rows_of(values, begin, end):
    """Return rows `begin` to `end` as `_lay_out` stored them, with the shape (blocks, rows,
    block)."""
    blocks, block = values.shape[1], values.shape[2]
    return view(
        values.ctypes.data + 4 * begin * blocks * block, (blocks, end - begin, block), FLOAT
    )


@inlined
def _activate(values, gate_up, factors, between, begins, first, last, inputs, group, like):
    """Compute the intermediate values (between the projections) from `first` to `last`, for all
    rows of all experts."""
    inner = between.shape[1]
    gates, ups = np.empty(len(between), np.float32), np.empty(len(between), np.float32)
    for expert in range(len(begins) - 1):
        begin, end = begins[expert], begins[expert + 1]
        if begin == end:
            continue
        mine, matrix = _rows_of(values, begin, end), gate_up + expert * 2 * inner * inputs
        for j in range(first, last):
            _totals(mine, matrix, factors[expert], gates, j, inputs, group, 0)
            _totals(mine, matrix, factors[expert], ups, inner + j, inputs, group, 0)
            for row in range(end - begin):
                between[begin + row, j] = wide(narrow(_swish(gates[row], ups[row]), like))


@inlined
def _lead_back(
    values, down, factors, found, choices, begins, first, last, inputs, group, offset
):  # fmt: skip
    """Compute the outputs from `first` to `last`, for all rows of all experts."""
    outputs, sums = found.shape[1], np.empty(len(found), np.float32)
    for expert in range(len(begins) - 1):
        begin, end = begins[expert], begins[expert + 1]
        if begin == end:
            continue
        mine, matrix = _rows_of(values, begin, end), down + expert * outputs * inputs
        for j in range(first, last):
            _totals(mine, matrix, factors[expert], sums, j, inputs, group, offset)
            for row in range(end - begin):
                found[choices[begin + row], j] = sums[row]


@both("aaaaaaaaaannnnnnnnnnnn", purpose=FP8_EXPERTS)
def _experts(
    x, gate_up, gate_up_scales, down, down_scales, order, firsts, shares, products, output,
    tokens, chosen, experts, hidden, inner, block,
    group, blocks, down_group, down_blocks, offset, parts, like,
):  # fmt: skip
    """Compute what `experts._experts` computes, with e4m3 matrices. Scales are float32 (experts,
    groups, blocks); each group has `group` outputs. Inputs of `down` start at `offset` in their
    first block; inputs of `gate_up` start at the beginning of a block."""
    rows = tokens * chosen
    source, results = view(x, (tokens, hidden), like), view(output, (tokens, hidden), like)
    choices, begins = view(order, (rows,), INT32), view(firsts, (experts + 1,), INT32)
    weights = view(shares, (tokens, chosen), FLOAT)
    found = view(products, (rows, hidden), FLOAT)
    groups, down_groups = (2 * inner + group - 1) // group, (hidden + down_group - 1) // down_group
    factors = view(gate_up_scales, (experts, groups, blocks), FLOAT)
    down_factors = view(down_scales, (experts, down_groups, down_blocks), FLOAT)
    gathered = np.empty((rows, hidden), np.float32)
    _gather(source, choices, chosen, gathered)
    values = np.empty((rows, blocks, block), np.float32)
    for expert in range(experts):
        _lay_out(gathered, values, begins[expert], begins[expert + 1], 0)
    between = np.empty((rows, inner), np.float32)
    for part in prange(parts):
        first, last = part * inner // parts, (part + 1) * inner // parts
        _activate(values, gate_up, factors, between, begins, first, last, hidden, group, like)
    values = np.empty((rows, down_blocks, block), np.float32)
    for expert in range(experts):
        _lay_out(between, values, begins[expert], begins[expert + 1], offset)
    for part in prange(parts):
        first, last = part * hidden // parts, (part + 1) * hidden // parts
        _lead_back(
            values,
            down,
            down_factors,
            found,
            choices,
            begins,
            first,
            last,
            inner,
            down_group,
            offset,
        )
    for part in prange(parts):
        for token in range(part * tokens // parts, (part + 1) * tokens // parts):
            _sum(found, weights, token, results, like)


def packed_experts_of_few(
    x: torch.Tensor,
    gate_up: Fp8Blocks,
    down: Fp8Blocks,
    ids: torch.Tensor,
    shares: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """Implement `Operators.experts` for contiguous matrices with blocks of the same size."""
    return run_experts(
        _experts,
        x,
        (gate_up.weight, gate_up.scales, down.weight, down.scales),
        down.weight.shape,
        ids,
        shares,
        threads,
        down.block,
        gate_up.group,
        gate_up.scales.shape[2],
        down.group,
        down.scales.shape[2],
        down.offset,
    )
