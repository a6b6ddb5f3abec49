"""Products of a few rows with e4m3 matrices, which are unpacked as they are read."""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT,
    FP8,
    both,
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
"""Factor by which an e4m3 number is too small if its four exponent bits become the low exponent
bits of a float32."""


@intrinsic
def _unpacked(typing_context, byte):
    """Return an e4m3 number divided by `_BIAS`, as float32. Denormal numbers stay denormal."""

    def generate(context, builder, signature, arguments):
        bits = builder.zext(arguments[0], ir.IntType(32))

        def moved(mask, places):
            return builder.shl(
                builder.and_(bits, ir.Constant(bits.type, mask)), ir.Constant(bits.type, places)
            )

        return builder.bitcast(builder.or_(moved(0x7F, 20), moved(0x80, 24)), ir.FloatType())

    return types.float32(byte), generate


# Loops count from 0: Numba assumes that any other start may be negative and checks each index,
# which prevents vectorization.


@inlined_reordered
def _one(x, weights, row):
    total = np.float32(0)
    for i in range(len(weights)):
        total += x[row, i] * _unpacked(weights[i])
    return total


@inlined_reordered
def _four(x, weights, row):
    """Multiply four rows by one range of an output's weights, which is read once."""
    a = b = c = d = np.float32(0)
    for i in range(len(weights)):
        weight = _unpacked(weights[i])
        a += x[row, i] * weight
        b += x[row + 1, i] * weight
        c += x[row + 2, i] * weight
        d += x[row + 3, i] * weight
    return a, b, c, d


@inlined
def _add_block(x, weights, totals, scale):
    """Add the products of one block of inputs to each row's total."""
    rows = x.shape[0]
    for row in range(0, rows - 3, 4):
        a, b, c, d = _four(x, weights, row)
        totals[row] += a * scale
        totals[row + 1] += b * scale
        totals[row + 2] += c * scale
        totals[row + 3] += d * scale
    for row in range(rows // 4 * 4, rows):
        totals[row] += _one(x, weights, row) * scale


@inlined
def _in_blocks(source, values, offset):
    """Copy inputs to `values`, whose shape is (blocks, rows, block size), so that the values of
    each block are contiguous."""
    blocks, rows, block = values.shape
    for number in range(blocks):
        first = number * block - offset
        for row in range(rows):
            for i in range(block):
                inside = 0 <= first + i < source.shape[1]
                values[number, row, i] = wide(source[row, first + i]) if inside else np.float32(0)


@inlined
def _totals(values, weight, factors, totals, j, inputs, group, offset):
    """Compute the j-th output of each row of `values` (blocks, rows, block)."""
    blocks, rows, block = values.shape
    totals[:rows] = np.float32(0)
    for number in range(blocks):
        begin = max(0, number * block - offset)
        size = min(inputs, (number + 1) * block - offset) - begin
        numbers = view(weight + j * inputs + begin, (size,), BYTE)
        _add_block(values[number], numbers, totals, factors[j // group, number] * _BIAS)


@both("aaaaannnnnnnn", purpose=FP8)
def _linear(
    x, weight, scales, bias, output,
    rows, inputs, outputs, group, blocks, block, offset, parts, like,
):  # fmt: skip
    """Compute x Wᵀ + b for `x` (rows, inputs), `weight` e4m3 (outputs, inputs) and `scales` float32
    (groups, blocks); each group has `group` outputs. A null bias address means that there is no
    bias. The first block has `block - offset` inputs.

    Each thread computes one of `parts` ranges of the outputs.
    """
    results, added = view(output, (rows, outputs), like), view(bias, (outputs,), like)
    factors = view(scales, ((outputs + group - 1) // group, blocks), FLOAT)
    # Move the first block's inputs to its start, so that every block is read from its start.
    values = np.empty((blocks, rows, block), np.float32)
    _in_blocks(view(x, (rows, inputs), like), values, offset)
    values[0, :, : block - offset] = values[0, :, offset:].copy()
    for part in prange(parts):
        totals = np.empty(rows, np.float32)
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            _totals(values, weight, factors, totals, j, inputs, group, offset)
            more = wide(added[j]) if bias else np.float32(0)
            for row in range(rows):
                results[row, j] = narrow(totals[row] + more, like)


@both("aaannnnnnnn", purpose=FP8)
def _unpack(
    weight, scales, output, first, inputs, outputs, group, blocks, block, offset, parts, like
):  # fmt: skip
    """Unpack the weights of the outputs from `first` on to `output`, (outputs, inputs). `scales`
    covers all outputs of the matrix, as in `_linear`."""
    results = view(output, (outputs, inputs), like)
    factors = view(scales, ((first + outputs + group - 1) // group, blocks), FLOAT)
    for part in prange(parts):
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            for number in range(blocks):
                begin = max(0, number * block - offset)
                size = min(inputs, (number + 1) * block - offset) - begin
                numbers = view(weight + j * inputs + begin, (size,), BYTE)
                at = output + (j * inputs + begin) * results.itemsize
                _scale(
                    numbers,
                    view(at, (size,), like),
                    factors[(first + j) // group, number] * _BIAS,
                    like,
                )


@inlined
def _scale(numbers, results, scale, like):
    for i in range(len(numbers)):
        results[i] = narrow(_unpacked(numbers[i]) * scale, like)


def fp8_unpacked(weights: Fp8Blocks, outputs: slice, threads: int) -> torch.Tensor:
    """Return some outputs of a matrix, unpacked to the model's dtype."""
    packed = weights.weight[outputs]
    whole = torch.empty(packed.shape, dtype=weights.dtype)
    spread(
        _unpack,
        threads,
        packed.numel(),
        packed.data_ptr(),
        weights.scales.data_ptr(),
        whole.data_ptr(),
        outputs.start,
        packed.shape[1],
        packed.shape[0],
        weights.group,
        weights.scales.shape[1],
        weights.block,
        weights.offset,
        threads,
        like_of(whole),
    )
    return whole


def fp8_product(x: torch.Tensor, weights: Fp8Blocks, threads: int) -> torch.Tensor:
    """Compute x Wᵀ + b."""
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
        weights.group,
        weights.scales.shape[1],
        weights.block,
        weights.offset,
        threads,
        like_of(x),
    )
    return y
