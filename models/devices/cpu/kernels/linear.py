"""Matrix products of a few rows: the weights are read once, in order, at memory bandwidth."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    both,
    inlined_reordered,
    like_of,
    narrow,
    spread,
    view,
    wide,
)


@inlined_reordered
def _one(x, weights, row, output):
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[row, i] * wide(weights[output, i])
    return total


@inlined_reordered
def _four(x, weights, row, output):
    """Multiply four rows by one output's weights, which are read once."""
    a = b = c = d = np.float32(0)
    for i in range(x.shape[1]):
        weight = wide(weights[output, i])
        a += x[row, i] * weight
        b += x[row + 1, i] * weight
        c += x[row + 2, i] * weight
        d += x[row + 3, i] * weight
    return a, b, c, d


@both("aaaannnn")
def _linear(x, weight, bias, output, rows, inputs, outputs, parts, like):
    """Compute x Wᵀ + b: (rows, inputs) and (outputs, inputs) to (rows, outputs). A null bias
    address means that there is no bias.

    Each thread computes one of `parts` ranges of the outputs, so that it reads the weights as one
    stream.
    """
    source, weights = view(x, (rows, inputs), like), view(weight, (outputs, inputs), like)
    results, added = view(output, (rows, outputs), like), view(bias, (outputs,), like)
    values = np.empty((rows, inputs), np.float32)
    for row in range(rows):
        for i in range(inputs):
            values[row, i] = wide(source[row, i])
    for part in prange(parts):
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            offset = wide(added[j]) if bias else np.float32(0)
            for row in range(0, rows - 3, 4):
                a, b, c, d = _four(values, weights, row, j)
                results[row, j] = narrow(a + offset, like)
                results[row + 1, j] = narrow(b + offset, like)
                results[row + 2, j] = narrow(c + offset, like)
                results[row + 3, j] = narrow(d + offset, like)
            for row in range(rows // 4 * 4, rows):
                results[row, j] = narrow(_one(values, weights, row, j) + offset, like)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
) -> torch.Tensor:
    """Compute x Wᵀ + b for a contiguous weight (outputs, inputs)."""
    x, (outputs, inputs) = x.contiguous(), weight.shape
    y = weight.new_empty((*x.shape[:-1], outputs))
    spread(
        _linear,
        threads,
        weight.numel(),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        threads,
        like_of(weight),
    )
    return y
