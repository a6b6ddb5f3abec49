"""Products of a few rows with matrices in e4m3, which are unpacked as they are read."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT,
    both,
    float_of,
    inlined,
    inlined_reordered,
    like_of,
    narrow,
    spread,
    view,
    wide,
)
from nanoactor.models.weights.fp8 import Fp8Blocks

BYTE = np.uint8(0)
_BIAS = np.float32(2.0**120)
"""A number's four bits of exponent, read as float32's last four, are so much too small."""


@inlined
def _unpacked(byte):
    """An e4m3 number over `_BIAS`; denormal numbers are denormal here too."""
    bits = np.uint32(byte)
    return float_of(
        np.uint32(
            ((bits & np.uint32(0x7F)) << np.uint32(20))
            | ((bits & np.uint32(0x80)) << np.uint32(24))
        )
    )


@inlined_reordered
def _one(x, weights, row, output, begin, end):
    total = np.float32(0)
    for i in range(begin, end):
        total += x[row, i] * _unpacked(weights[output, i])
    return total


@inlined_reordered
def _four(x, weights, row, output, begin, end):
    """Products of four rows with one stretch of an output's weights, which is read once."""
    a = b = c = d = np.float32(0)
    for i in range(begin, end):
        weight = _unpacked(weights[output, i])
        a += x[row, i] * weight
        b += x[row + 1, i] * weight
        c += x[row + 2, i] * weight
        d += x[row + 3, i] * weight
    return a, b, c, d


@inlined
def _add_block(x, weights, totals, output, begin, end, scale):
    """Add what one block of inputs gives to each row's total."""
    rows = x.shape[0]
    for row in range(0, rows - 3, 4):
        a, b, c, d = _four(x, weights, row, output, begin, end)
        totals[row] += a * scale
        totals[row + 1] += b * scale
        totals[row + 2] += c * scale
        totals[row + 3] += d * scale
    for row in range(rows // 4 * 4, rows):
        totals[row] += _one(x, weights, row, output, begin, end) * scale


@both("aaaaannnnnnn")
def _linear(
    x, weight, scales, bias, output, rows, inputs, outputs, blocks, block, offset, parts, like
):  # fmt: skip
    """x Wᵀ + b for (rows, inputs), e4m3 (outputs, inputs) and scales float32 (outputs, blocks); a
    bias at 0 is none. The first block has `block - offset` inputs.

    Each thread has one of `parts` stretches of the outputs.
    """
    source, weights = view(x, (rows, inputs), like), view(weight, (outputs, inputs), BYTE)
    results, added = view(output, (rows, outputs), like), view(bias, (outputs,), like)
    factors = view(scales, (outputs, blocks), FLOAT)
    values = np.empty((rows, inputs), np.float32)
    for row in range(rows):
        for i in range(inputs):
            values[row, i] = wide(source[row, i])
    for part in prange(parts):
        totals = np.empty(rows, np.float32)
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            totals[:] = wide(added[j]) if bias else np.float32(0)
            for number in range(blocks):
                begin = max(0, number * block - offset)
                end = min(inputs, (number + 1) * block - offset)
                _add_block(values, weights, totals, j, begin, end, factors[j, number] * _BIAS)
            for row in range(rows):
                results[row, j] = narrow(totals[row], like)


def fp8_product(x: torch.Tensor, weights: Fp8Blocks, threads: int) -> torch.Tensor:
    """x Wᵀ + b."""
    x, (outputs, inputs) = x.contiguous(), weights.weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    bias = weights.bias
    spread(
        _linear,
        threads,
        weights.weight.numel(),
        x.data_ptr(),
        weights.weight.data_ptr(),
        weights.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        weights.scales.shape[1],
        weights.block,
        weights.offset,
        threads,
        like_of(x),
    )
    return y
