"""The operator x Wᵀ + b for an FP8 matrix, with the CUDA C++ kernels."""

from __future__ import annotations

import torch

from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import (
    Kernels,
    Matrix,
    arguments_of,
    log_fallback,
    memory_for,
    quantize,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    TRITON_MAX_ROWS,
    Division,
    choose_division,
    unsupported_reason,
)
from nanoactor.models.devices.cuda.kernels.rounding import Rows
from nanoactor.models.weights.fp8 import Fp8Blocks


def linear_of(weights: Fp8Blocks, kernels: Kernels | None) -> TritonFp8Linear:
    """Return the operator for these weights. `unsupported_reason` must have returned None for them.

    If `kernels` is None, the result uses Triton. If the kernels do not support the weights, it
    does, too, and a warning is logged once. Raises `DriverError` if a tensor map cannot be encoded.
    """
    if kernels is None:
        return TritonFp8Linear(weights)
    if reason := unsupported_reason(weights.block, weights.group):
        log_fallback(reason)
        return TritonFp8Linear(weights)
    return HopperFp8Linear(weights, kernels)


class HopperFp8Linear(TritonFp8Linear):
    """The operator x Wᵀ + b for an FP8 matrix, with the CUDA C++ kernels.

    It uses Triton for few rows, and for dtypes other than bfloat16.
    """

    def __init__(self, weights: Fp8Blocks, kernels: Kernels) -> None:
        """Pack the weights. Both functions called `unsupported_reason`, of `fp8` and of `variants`,
        must have returned None for them. Raises `DriverError` if the tensor map cannot be
        encoded."""
        super().__init__(weights)
        self.kernels = kernels
        self.kernel_matrix = Matrix(self._packed)

    def division(self, rows: int) -> Division:
        """Return the division of the product with `rows` rows among thread blocks."""
        matrix = self.kernel_matrix
        return choose_division(rows, matrix.outputs, matrix.blocks, self.kernels.clusters)

    def multiply(self, rows: Rows, division: Division, y: torch.Tensor) -> None:
        """Write the product of rounded rows to `y`, bfloat16 (tokens, outputs). Raises
        `DriverError` if the launch fails."""
        variant = division.variant
        args = arguments_of(self.kernel_matrix, variant, rows, division.row_tiles, y, len(y))
        args.bias = None if self.bias is None else self.bias.data_ptr()
        args.cluster = division.cluster
        self.kernels.multiply(variant, args, division.blocks)

    def memory_for(self, x: torch.Tensor) -> Rows | None:
        """Return memory for the rounded rows of `x`, (tokens, inputs), or None if they need
        padding."""
        if _uses_triton(x):
            return super().memory_for(x)
        return memory_for(x, self._packed, self.division(len(x)).slots)

    def _product(self, x: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        if _uses_triton(x):
            return super()._product(x, rows)
        division = self.division(len(x))
        y = x.new_empty(len(x), self.kernel_matrix.outputs)
        rows = rows or quantize(self.kernels, x, self._packed, division.slots)
        self.multiply(rows, division, y)
        return y


def _uses_triton(x: torch.Tensor) -> bool:
    return x.dtype != torch.bfloat16 or len(x) <= TRITON_MAX_ROWS
