"""Grouped GEMMs of experts whose weights are not packed. They use the CUDA C++ kernels where these
are faster than Triton's."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from nanoactor.models.devices.cuda.kernels import experts_dense
from nanoactor.models.devices.cuda.kernels.driver import MAP_BYTES, tensor_map
from nanoactor.models.devices.cuda.kernels.optional import OptionalKernels
from nanoactor.models.devices.cuda.kernels.routing import Blocks, align_blocks
from nanoactor.models.devices.cuda.kernels.tiles import (
    BAND,
    BLOCK_BYTES,
    Args,
    ProductKernels,
    Variant,
    output_tiles,
    source_of,
)
from nanoactor.models.weights.linear import DenseExperts

log = logging.getLogger("nanoactor.models.expert_products")

BLOCK = BLOCK_BYTES // 2
"""Number of inputs in a stage."""
_PAIRS = {128: range(64, 1 << 31), 64: range(32, 96)}
"""Mean numbers of pairs per expert with which the kernels with tiles of so many rows are faster
than those in Triton, in the order in which the tiles are tried. Measured on an H200."""
_MIN_TILES = 2
"""Mean number of tiles of the first product per multiprocessor from which these kernels are faster
than those in Triton, whose tiles are smaller. Measured on an H200."""
VARIANTS = tuple(
    Variant(epilogue, tokens, 2) for epilogue in ("GATHERED", "WEIGHTED") for tokens in (64, 128)
)
_NAME = "expert_products"


def source(machine: str | None = None) -> str:
    """Return the CUDA source of all kernels. `machine` is source text that replaces the instruction
    wrappers; None means `machine.cuh`."""
    return source_of(Path(__file__).with_name("product.cu"), VARIANTS, machine=machine)


class Kernels(ProductKernels):
    """All kernels for experts, loaded on the current device."""

    def __init__(self) -> None:
        """Load the kernels from disk, or compile them. Raises `CompileError` or `DriverError` if
        that fails."""
        super().__init__(_NAME, source(), VARIANTS)


@functools.cache
def log_fallback(reason: str) -> None:
    """Log a warning, once for each reason, that the Triton kernels are used instead."""
    log.warning(
        "experts with many tokens use the Triton kernels, which take up to 1.4 times as long: %s",
        reason,
    )


def optional_kernels(capability: tuple[int, int]) -> OptionalKernels[Kernels]:
    """Return the kernels of a device for experts, which are loaded when they are first needed."""
    return OptionalKernels(capability, Kernels, log_fallback)


def unsupported_reason(weights: DenseExperts) -> str | None:
    """Return why the kernels do not support a layer's experts, or None if they do."""
    _, hidden, inner = weights.down.shape
    if weights.down.dtype != torch.bfloat16:
        return f"the dtype is {weights.down.dtype}"
    if hidden % BLOCK or inner % BLOCK:
        return f"the inputs of a projection ({hidden} or {inner}) are not a multiple of {BLOCK}"
    return None


def choose_variants(
    pairs: int, experts: int, inner: int, processors: int
) -> tuple[Variant, Variant] | None:
    """Return the variants for the gate and up product and for the down product, or None if the
    Triton kernels are faster.

    There are `pairs` token-expert pairs and `experts` experts with `inner` gates each.
    """
    for tokens, counts in _PAIRS.items():
        # Most experts have a tile that is not full.
        tiles = (pairs // tokens + experts // 2) * -(-inner // 128)
        if pairs // experts in counts and tiles >= _MIN_TILES * processors:
            return Variant("GATHERED", tokens, 2), Variant("WEIGHTED", tokens, 2)
    return None


class _Matrix:
    """The stacked matrices of all experts, and the tensor map through which kernels read them."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Encode the tensor map of `weight`, bfloat16 (experts, outputs, inputs). Raises
        `DriverError` if that fails."""
        self.weight = weight.contiguous()
        experts, self.outputs, inputs = weight.shape
        self.blocks = inputs // BLOCK
        row_bytes = inputs * weight.itemsize
        self.map = tensor_map(
            "UINT8",
            self.weight.data_ptr(),
            (row_bytes, experts * self.outputs),
            (row_bytes,),
            (BLOCK_BYTES, 128),
        )


class HopperExperts:
    """The grouped GEMMs of a layer's experts, on Hopper GPUs."""

    def __init__(self, weights: DenseExperts, kernels: Kernels) -> None:
        """Encode the matrices' tensor maps. `unsupported_reason` must have returned None for the
        weights. Raises `DriverError` if encoding fails."""
        self._weights = weights
        self._gate_up, self._down = _Matrix(weights.gate_up), _Matrix(weights.down)
        self._kernels = kernels

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of each token-expert pair, multiplied by its routing weight, (tokens,
        top_k, hidden)."""
        tokens, top_k = ids.shape
        experts, hidden, inner = self._weights.down.shape
        variants = choose_variants(tokens * top_k, experts, inner, self._kernels.processors)
        if variants is None:
            return experts_dense.grouped_gemms(x, self._weights, ids, topk_weights)
        first, second = variants
        blocks = align_blocks(ids, experts, first.tokens)
        # (blocks of inputs, slots, inputs), with swizzled chunks of 16 bytes
        intermediate = x.new_empty(inner // BLOCK, len(blocks.pair_ids), BLOCK)
        self._run(self._gate_up, first, x, intermediate, blocks, ids, topk_weights)
        pair_outputs = x.new_empty(tokens, top_k, hidden)
        self._run(self._down, second, intermediate, pair_outputs, blocks, ids, topk_weights)
        return pair_outputs

    def _run(
        self,
        matrix: _Matrix,
        variant: Variant,
        rows: torch.Tensor,
        y: torch.Tensor,
        blocks: Blocks,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        """Queue the product of `rows` with `matrix`, and write the results to `y`."""
        tiles, processors = output_tiles(variant, matrix.outputs), self._kernels.processors
        args = Args(
            rows=rows.data_ptr(),
            y=y.data_ptr(),
            owners=blocks.expert_ids.data_ptr(),
            used=blocks.num_used.data_ptr(),
            pairs=blocks.pair_ids.data_ptr(),
            shares=topk_weights.data_ptr(),
            slots=len(blocks.pair_ids),
            count=ids.numel(),
            outputs=matrix.outputs,
            blocks=matrix.blocks,
            row_tiles=len(blocks.expert_ids),
            output_tiles=tiles,
            cluster=1,
            band=BAND,
            chosen=ids.shape[1],
        )
        ctypes.memmove(args.weight, matrix.map, MAP_BYTES)
        self._kernels.multiply(variant, args, min(processors, args.row_tiles * tiles))
