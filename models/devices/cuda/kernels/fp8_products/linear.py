"""The operator x Wᵀ + b for an FP8 matrix, with the CUDA C++ kernels."""

from __future__ import annotations

import torch

from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import (
    Kernels,
    Matrix,
    arguments_of,
    quantize,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    BLOCK,
    TRITON_MAX_ROWS,
    choose_division,
)
from nanoactor.models.weights.fp8 import Fp8Blocks


def linear_of(weights: Fp8Blocks, kernels: Kernels | None) -> TritonFp8Linear:
    """Return the operator for these weights. `unsupported_reason` must have returned None for them.

    If `kernels` is None, the result uses Triton. Raises `DriverError` if a tensor map cannot be
    encoded.
    """
    if kernels is None or weights.block != BLOCK:
        return TritonFp8Linear(weights)
    return HopperFp8Linear(weights, kernels)


class HopperFp8Linear(TritonFp8Linear):
    """The operator x Wᵀ + b for an FP8 matrix, with the CUDA C++ kernels.

    It uses Triton for few rows, and for dtypes other than bfloat16.
    """

    def __init__(self, weights: Fp8Blocks, kernels: Kernels) -> None:
        """Pack the weights, whose block size must be `BLOCK`. `unsupported_reason` must have
        returned None for them. Raises `DriverError` if the tensor map cannot be encoded."""
        super().__init__(weights)
        self._kernels = kernels
        self._matrix = Matrix(self._packed)
        device = self._packed.weight.device
        # Zero between products, which follow each other on one stream.
        self._arrivals = torch.zeros(kernels.processors, dtype=torch.int32, device=device)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        matrix, kernels = self._matrix, self._kernels
        if x.dtype != torch.bfloat16 or len(x) <= TRITON_MAX_ROWS:
            return super()._product(x)
        division = choose_division(len(x), matrix.outputs, matrix.blocks, kernels.processors)
        variant = division.variant
        y = x.new_empty(len(x), matrix.outputs)
        rows = quantize(kernels, x, self._packed, division.row_tiles * variant.tokens)
        args = arguments_of(matrix, variant, rows, y, len(x))
        args.bias = None if self.bias is None else self.bias.data_ptr()
        args.units = division.units
        if division.units:
            size = 2, 128 * variant.halves, variant.tokens
            parts = torch.empty(division.blocks, *size, dtype=torch.float32, device=x.device)
            args.parts, args.arrivals = parts.data_ptr(), self._arrivals.data_ptr()
        kernels.multiply(variant, args, division.blocks)
        return y
