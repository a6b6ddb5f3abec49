"""Kernel for matrix products of a few rows. The weights are read once, in order, at memory
bandwidth."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from nanoactor.models.devices.cpu.kernels.elements import (
    inlined_reordered,
    launch,
    like_of,
    narrow,
    serial_and_parallel,
    view,
    widen,
)


@inlined_reordered
def _dot_one_row(x, weights, row, output):
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[row, i] * widen(weights[output, i])
    return total


@inlined_reordered
def _dot_four_rows(x, weights, row, output):
    """Return the dot products of four rows, from `row` on, with the weights of one output. The
    weights are read only once."""
    a = b = c = d = np.float32(0)
    for i in range(x.shape[1]):
        weight = widen(weights[output, i])
        a += x[row, i] * weight
        b += x[row + 1, i] * weight
        c += x[row + 2, i] * weight
        d += x[row + 3, i] * weight
    return a, b, c, d


@serial_and_parallel("aaaannnn")
def _linear(x, weight, bias, output, rows, inputs, outputs, parts, like):
    """Compute x Wᵀ + b for `x` (rows, inputs) and `weight` (outputs, inputs). If the address of the
    bias is null, there is none.

    Each thread computes one of `parts` ranges of the outputs, so it reads the weights as one
    stream.
    """
    source, weights = view(x, (rows, inputs), like), view(weight, (outputs, inputs), like)
    results, biases = view(output, (rows, outputs), like), view(bias, (outputs,), like)
    values = np.empty((rows, inputs), np.float32)
    for row in range(rows):
        for i in range(inputs):
            values[row, i] = widen(source[row, i])
    for part in prange(parts):
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            bias_value = widen(biases[j]) if bias else np.float32(0)
            for row in range(0, rows - 3, 4):
                a, b, c, d = _dot_four_rows(values, weights, row, j)
                results[row, j] = narrow(a + bias_value, like)
                results[row + 1, j] = narrow(b + bias_value, like)
                results[row + 2, j] = narrow(c + bias_value, like)
                results[row + 3, j] = narrow(d + bias_value, like)
            for row in range(rows // 4 * 4, rows):
                results[row, j] = narrow(_dot_one_row(values, weights, row, j) + bias_value, like)


def few_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
) -> torch.Tensor:
    """Return x Wᵀ + b for `x` (..., inputs) and a contiguous `weight` (outputs, inputs)."""
    x, (outputs, inputs) = x.contiguous(), weight.shape
    y = weight.new_empty((*x.shape[:-1], outputs))
    launch(
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
