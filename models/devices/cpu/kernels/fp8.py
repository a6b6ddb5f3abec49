"""Kernels for products of a few rows with FP8 (e4m3) matrices, which are unpacked as they are
read."""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT32,
    FP8,
    inlined,
    inlined_reordered,
    launch,
    like_of,
    narrow,
    serial_and_parallel,
    view,
    widen,
)
from nanoactor.models.weights.fp8 import Fp8Blocks

BYTE = np.uint8(0)
_E4M3_SCALE = np.float32(2.0**120)
"""Factor that corrects an e4m3 number after its bits were moved into a float32. The exponent bias
is 7 in e4m3, but 127 in float32."""


@intrinsic
def _unpack_e4m3(typing_context, byte):
    """Return an e4m3 number divided by `_E4M3_SCALE`, as float32. Denormal e4m3 numbers become
    denormal float32 numbers."""

    def generate(context, builder, signature, arguments):
        bits = builder.zext(arguments[0], ir.IntType(32))

        def shifted(mask, by):
            return builder.shl(
                builder.and_(bits, ir.Constant(bits.type, mask)), ir.Constant(bits.type, by)
            )

        return builder.bitcast(builder.or_(shifted(0x7F, 20), shifted(0x80, 24)), ir.FloatType())

    return types.float32(byte), generate


# Loops count from 0: Numba assumes that any other start may be negative and checks each index,
# which prevents vectorization.


@inlined_reordered
def _dot_one_row(x, weights, row):
    total = np.float32(0)
    for i in range(len(weights)):
        total += x[row, i] * _unpack_e4m3(weights[i])
    return total


@inlined_reordered
def _dot_four_rows(x, weights, row):
    """Return the dot products of four rows, from `row` on, with a range of one output's weights.
    The weights are read only once."""
    a = b = c = d = np.float32(0)
    for i in range(len(weights)):
        weight = _unpack_e4m3(weights[i])
        a += x[row, i] * weight
        b += x[row + 1, i] * weight
        c += x[row + 2, i] * weight
        d += x[row + 3, i] * weight
    return a, b, c, d


@inlined
def _add_block(x, weights, totals, scale):
    """Add each row's dot product with one block of weights, times `scale`, to the row's total."""
    rows = x.shape[0]
    for row in range(0, rows - 3, 4):
        a, b, c, d = _dot_four_rows(x, weights, row)
        totals[row] += a * scale
        totals[row + 1] += b * scale
        totals[row + 2] += c * scale
        totals[row + 3] += d * scale
    for row in range(rows // 4 * 4, rows):
        totals[row] += _dot_one_row(x, weights, row) * scale


@inlined
def _copy_to_blocks(source, values, offset):
    """Copy inputs to `values`, (blocks, rows, block size), so that the inputs of each block are
    contiguous. They start at `offset` in the first block, and zeros fill the rest."""
    blocks, rows, block = values.shape
    for index in range(blocks):
        first = index * block - offset
        for row in range(rows):
            for i in range(block):
                inside = 0 <= first + i < source.shape[1]
                values[index, row, i] = widen(source[row, first + i]) if inside else np.float32(0)


@inlined
def _compute_output(values, weight, factors, totals, j, inputs, group, offset):
    """Compute output j for each row of `values`, (blocks, rows, block), and store it in
    `totals`."""
    blocks, rows, block = values.shape
    totals[:rows] = np.float32(0)
    for index in range(blocks):
        start = max(0, index * block - offset)
        size = min(inputs, (index + 1) * block - offset) - start
        packed = view(weight + j * inputs + start, (size,), BYTE)
        _add_block(values[index], packed, totals, factors[j // group, index] * _E4M3_SCALE)


@serial_and_parallel("aaaaannnnnnnn", purpose=FP8)
def _linear(
    x, weight, scales, bias, output,
    rows, inputs, outputs, group, blocks, block, offset, parts, like,
):  # fmt: skip
    """Compute x Wᵀ + b for `x` (rows, inputs) and an e4m3 `weight` (outputs, inputs).

    `scales` is float32 (groups, blocks); each group has `group` outputs. The first block has `block
    - offset` inputs. If the address of the bias is null, there is none. Each thread computes one of
    `parts` ranges of the outputs.
    """
    results, biases = view(output, (rows, outputs), like), view(bias, (outputs,), like)
    factors = view(scales, ((outputs + group - 1) // group, blocks), FLOAT32)
    # Move the first block's inputs to its start, so that every block is read from its start.
    values = np.empty((blocks, rows, block), np.float32)
    _copy_to_blocks(view(x, (rows, inputs), like), values, offset)
    values[0, :, : block - offset] = values[0, :, offset:].copy()
    for part in prange(parts):
        totals = np.empty(rows, np.float32)
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            _compute_output(values, weight, factors, totals, j, inputs, group, offset)
            bias_value = widen(biases[j]) if bias else np.float32(0)
            for row in range(rows):
                results[row, j] = narrow(totals[row] + bias_value, like)


@serial_and_parallel("aaannnnnnnn", purpose=FP8)
def _unpack(
    weight, scales, output, first, inputs, outputs, group, blocks, block, offset, parts, like
):  # fmt: skip
    """Unpack the weights of `outputs` outputs of a matrix, from output `first` on, to `output`,
    (outputs, inputs).

    `weight` points to the weights of output `first`, but `scales`, float32 (groups, blocks), points
    to the scales of output 0.
    """
    results = view(output, (outputs, inputs), like)
    factors = view(scales, ((first + outputs + group - 1) // group, blocks), FLOAT32)
    for part in prange(parts):
        for j in range(part * outputs // parts, (part + 1) * outputs // parts):
            for index in range(blocks):
                start = max(0, index * block - offset)
                size = min(inputs, (index + 1) * block - offset) - start
                packed = view(weight + j * inputs + start, (size,), BYTE)
                address = output + (j * inputs + start) * results.itemsize
                _dequantize_block(
                    packed,
                    view(address, (size,), like),
                    factors[(first + j) // group, index] * _E4M3_SCALE,
                    like,
                )


@inlined
def _dequantize_block(packed, results, scale, like):
    for i in range(len(packed)):
        results[i] = narrow(_unpack_e4m3(packed[i]) * scale, like)


def dequantize_outputs(weights: Fp8Blocks, outputs: slice, threads: int) -> torch.Tensor:
    """Return the weights of the outputs in a slice, (outputs, inputs), unpacked to the model's
    dtype. The slice must have an explicit start."""
    packed = weights.weight[outputs]
    unpacked = torch.empty(packed.shape, dtype=weights.dtype)
    launch(
        _unpack,
        threads,
        packed.numel(),
        packed.data_ptr(),
        weights.scales.data_ptr(),
        unpacked.data_ptr(),
        outputs.start,
        packed.shape[1],
        packed.shape[0],
        weights.group,
        weights.scales.shape[1],
        weights.block,
        weights.offset,
        threads,
        like_of(unpacked),
    )
    return unpacked


def fp8_linear(x: torch.Tensor, weights: Fp8Blocks, threads: int) -> torch.Tensor:
    """Return x Wᵀ + b for `x` of any shape (..., inputs)."""
    x, (outputs, inputs) = x.contiguous(), weights.weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    bias = weights.bias
    launch(
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
