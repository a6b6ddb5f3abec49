"""The SwiGLU feed-forward operator for FP8 matrices, with the CUDA C++ kernels."""

from __future__ import annotations

import functools
import logging

import torch

from nanoactor.models.devices.cuda.kernels.fp8_products.launch import (
    arguments_of,
    memory_for,
    quantize,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.linear import HopperFp8Linear
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    BLOCK,
    TRITON_MAX_MLP_ROWS,
    Division,
    choose_swiglu_variant,
)
from nanoactor.models.devices.cuda.kernels.rounding import RoundingOperator, Rows
from nanoactor.models.devices.cuda.kernels.tiles import Variant
from nanoactor.models.devices.protocols import LinearOperator

log = logging.getLogger("nanoactor.models.fp8_products")


def mlp_of(
    gate_up: LinearOperator, down: LinearOperator, otherwise: LinearOperator
) -> LinearOperator:
    """Return the operator down(swiglu(gate_up(x))).

    If the projections do not use the CUDA C++ kernels, this is `otherwise`. It is also `otherwise`
    if the kernels do not support these projections, and a warning is logged once.
    """
    if not isinstance(gate_up, HopperFp8Linear) or not isinstance(down, HopperFp8Linear):
        return otherwise
    if reason := mlp_unsupported_reason(gate_up, down):
        _log_fallback(reason)
        return otherwise
    return HopperMLP(gate_up, down, otherwise)


def mlp_unsupported_reason(gate_up: HopperFp8Linear, down: HopperFp8Linear) -> str | None:
    """Return why SwiGLU cannot be part of the first product, or None if it can."""
    if gate_up.bias is not None:
        return "the gate and up projections have biases"
    if gate_up.kernel_matrix.outputs // 2 % BLOCK or down.kernel_matrix.packed.offset:
        return f"the inputs of the down projection are not whole blocks of {BLOCK}"
    return None


@functools.cache
def _log_fallback(reason: str) -> None:
    log.warning(
        "SwiGLU of FP8 layers runs as a kernel of its own, so that feed-forward parts take up to "
        "1.2 times as long: %s",
        reason,
    )


class HopperMLP(RoundingOperator):
    """The operator down(swiglu(gate_up(x))) for FP8 matrices.

    The gate and up projections of the same outputs are in one tile, so that SwiGLU and the rounding
    for the down projection happen in registers.
    """

    def __init__(
        self, gate_up: HopperFp8Linear, down: HopperFp8Linear, otherwise: LinearOperator
    ) -> None:
        """Combine two projections. `gate_up` must have no bias, and the inputs of `down` must be
        whole blocks. `otherwise` is used where the kernels are slower, and for other dtypes."""
        self._gate_up, self._down, self._otherwise = gate_up, down, otherwise

    def memory_for(self, x: torch.Tensor) -> Rows | None:
        """Return memory for the rounded rows of `x`, (tokens, hidden), or None if the operator
        would not read them."""
        variant = self._variant(x)
        if variant is None:  # `gate_up` is called with `x`
            return self._gate_up.memory_for(x)
        slots = self._slots(len(x), variant, self._down.division(len(x)))
        return memory_for(x, self._gate_up.kernel_matrix.packed, slots)

    def _variant(self, x: torch.Tensor) -> Variant | None:
        """Return the variant of the first product, or None if separate operators are faster."""
        if x.dtype != torch.bfloat16 or len(x) <= TRITON_MAX_MLP_ROWS:
            return None
        matrix, clusters = self._gate_up.kernel_matrix, self._gate_up.kernels.clusters
        return choose_swiglu_variant(len(x), matrix.outputs // 2, matrix.blocks, clusters)

    @staticmethod
    def _slots(rows: int, variant: Variant, division: Division) -> int:
        return max(-(-rows // variant.tokens) * variant.tokens, division.slots)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(swiglu(gate_up(x))) for `x` (tokens, hidden). Raises `DriverError` if a
        launch fails."""
        variant, rows = self._variant(x), self.take(x)
        if variant is None:
            if rows is not None:
                self._gate_up.give(x, rows)
            return self._otherwise(x)
        matrix, kernels = self._gate_up.kernel_matrix, self._gate_up.kernels
        row_tiles = -(-len(x) // variant.tokens)
        division = self._down.division(len(x))
        slots = self._slots(len(x), variant, division)
        rows = rows or quantize(kernels, x.contiguous(), matrix.packed, slots)
        inner = Rows.empty_swizzled(self._down.kernel_matrix.blocks, slots, x.device)
        args = arguments_of(matrix, variant, rows, row_tiles, inner.values, len(x))
        args.y_scales = inner.scales.data_ptr()
        kernels.multiply(variant, args, min(kernels.processors, row_tiles * args.output_tiles))
        y = x.new_empty(len(x), self._down.kernel_matrix.outputs)
        self._down.multiply(inner, division, y)
        return y
