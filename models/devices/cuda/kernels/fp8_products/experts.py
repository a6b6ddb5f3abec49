"""Grouped GEMMs of experts in FP8. They use the CUDA C++ kernels where these are faster than
Triton's."""

from __future__ import annotations

import torch

from nanoactor.models.devices.cuda.kernels.experts_fp8 import grouped_gemms
from nanoactor.models.devices.cuda.kernels.fp8 import Packed, quantize
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import (
    Kernels,
    Matrix,
    arguments_of,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    BLOCK,
    choose_variants,
    unsupported_reason,
)
from nanoactor.models.devices.cuda.kernels.rounding import Rows
from nanoactor.models.devices.cuda.kernels.routing import Blocks, align_blocks
from nanoactor.models.devices.cuda.kernels.tiles import BAND, Args, Variant


def experts_unsupported_reason(gate_up: Packed, down: Packed) -> str | None:
    """Return why the CUDA C++ kernels do not support a layer's experts, or None if they do."""
    for matrix in (gate_up, down):
        if reason := unsupported_reason(matrix.block, matrix.group):
            return reason
    inner = gate_up.weight.shape[1] // 2
    if inner % BLOCK or down.offset:
        return f"the inputs of a down projection are not whole blocks of {BLOCK}"
    return None


class HopperExperts:
    """The grouped GEMMs of a layer's experts, on Hopper GPUs."""

    def __init__(self, gate_up: Packed, down: Packed, kernels: Kernels) -> None:
        """Encode the matrices' tensor maps. `experts_unsupported_reason` must have returned None
        for the matrices. Raises `DriverError` if encoding fails."""
        self._gate_up, self._down = Matrix(gate_up), Matrix(down)
        self._kernels = kernels

    def __call__(
        self, x: torch.Tensor, rows: Rows | None, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of each token-expert pair, multiplied by its routing weight, (tokens,
        top_k, hidden).

        `rows` are the rounded rows of `x`, or None if they are not available.
        """
        tokens, top_k = ids.shape
        experts = len(self._down.packed.weight)
        variants = choose_variants(tokens * top_k, experts)
        if variants is None or x.dtype != torch.bfloat16:
            matrices = self._gate_up.packed, self._down.packed
            return grouped_gemms(x, rows, *matrices, ids, topk_weights)
        first, second = variants
        blocks = align_blocks(ids, experts, first.tokens)
        rows = rows or quantize(x, self._gate_up.packed)
        intermediate = Rows.empty_swizzled(self._down.blocks, len(blocks.pair_ids), x.device)
        args = self._arguments(self._gate_up, first, rows, blocks, intermediate.values, ids)
        args.y_scales, args.slots = intermediate.scales.data_ptr(), len(blocks.pair_ids)
        self._run(first, args)
        pair_outputs = x.new_empty(tokens, top_k, self._down.outputs)
        args = self._arguments(self._down, second, intermediate, blocks, pair_outputs, ids)
        args.shares = topk_weights.data_ptr()
        self._run(second, args)
        return pair_outputs

    def _arguments(
        self,
        matrix: Matrix,
        variant: Variant,
        rows: Rows,
        blocks: Blocks,
        y: torch.Tensor,
        ids: torch.Tensor,
    ) -> Args:
        """Return the parameters of the product of `rows` with `matrix`."""
        args = arguments_of(matrix, variant, rows, len(blocks.expert_ids), y, ids.numel())
        args.owners, args.used = blocks.expert_ids.data_ptr(), blocks.num_used.data_ptr()
        args.pairs, args.chosen = blocks.pair_ids.data_ptr(), ids.shape[1]
        args.band = BAND
        return args

    def _run(self, variant: Variant, args: Args) -> None:
        tiles = args.row_tiles * args.output_tiles
        self._kernels.multiply(variant, args, min(self._kernels.processors, tiles))
