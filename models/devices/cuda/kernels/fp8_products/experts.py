"""Grouped GEMMs of experts in FP8, by the kernels in CUDA C++ where these are faster."""

from __future__ import annotations

import torch

from nanoactor.models.devices.cuda.kernels.experts_fp8 import grouped
from nanoactor.models.devices.cuda.kernels.fp8 import Packed
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import (
    Args,
    Kernels,
    Matrix,
    Rows,
    arguments_of,
    gather,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    BLOCK,
    Variant,
    variants_for,
)
from nanoactor.models.devices.cuda.kernels.routing import blocks_of


def supports(gate_up: Packed, down: Packed) -> bool:
    """Return True if these kernels support a layer's experts: the outputs of the gate and up
    projections must form whole blocks of the next product's inputs."""
    inner = gate_up.weight.shape[1] // 2
    return gate_up.block == down.block == BLOCK and inner % BLOCK == 0 and down.offset == 0


class HopperExperts:
    """The grouped GEMMs of a layer's experts."""

    def __init__(self, gate_up: Packed, down: Packed, kernels: Kernels) -> None:
        """Encode the tensor maps of matrices that `supports` accepts. Raises `DriverError` if that
        fails."""
        self._gate_up, self._down = Matrix(gate_up), Matrix(down)
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the output of each token-expert pair times its routing weight, (tokens, chosen,
        hidden)."""
        tokens, chosen = ids.shape
        experts = len(self._down.packed.weight)
        variants = variants_for(tokens * chosen, experts)
        if variants is None or x.dtype != torch.bfloat16:
            return grouped(x, self._gate_up.packed, self._down.packed, ids, shares)
        first, second = variants
        blocks = blocks_of(ids, experts, first.tokens)
        rows = gather(self._kernels, x, self._gate_up.packed, blocks, chosen, first.tokens)
        between = Rows.empty(self._down.blocks, len(blocks.rows), x.device)
        args = arguments_of(self._gate_up, first, rows, between.values, tokens)
        args.y_scales = between.scales.data_ptr()
        args.owners, args.used = blocks.owners.data_ptr(), blocks.used.data_ptr()
        self._run(first, args)
        parts = x.new_empty(tokens, chosen, self._down.outputs)
        args = arguments_of(self._down, second, between, parts, tokens * chosen)
        args.owners, args.used = blocks.owners.data_ptr(), blocks.used.data_ptr()
        args.pairs, args.shares = blocks.rows.data_ptr(), shares.data_ptr()
        self._run(second, args)
        return parts

    def _run(self, variant: Variant, args: Args) -> None:
        tiles = args.row_tiles * args.output_tiles
        self._kernels.multiply(variant, args, min(self._kernels.processors, tiles))
