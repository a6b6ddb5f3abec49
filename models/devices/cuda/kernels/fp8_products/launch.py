"""Loading and launching of the FP8 product kernels, and preparation of the rows that they
multiply."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from nanoactor.models.devices.cuda.kernels.driver import (
    MAP_BYTES,
    DriverError,
    Kernel,
    tensor_map,
)
from nanoactor.models.devices.cuda.kernels.fp8 import Packed
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    AT_ONCE,
    BLOCK,
    MAX_CLUSTER,
    ROUNDING,
    ROUNDING_THREADS,
    VARIANTS,
    source,
)
from nanoactor.models.devices.cuda.kernels.optional import OptionalKernels
from nanoactor.models.devices.cuda.kernels.rounding import Rows
from nanoactor.models.devices.cuda.kernels.tiles import Args, ProductKernels, Variant, output_tiles

log = logging.getLogger("nanoactor.models.fp8_products")

_NAME = "fp8_products"


class RoundArgs(ctypes.Structure):
    """Parameters of the rounding kernel; mirror of `RoundArgs` in `product.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "rows", "scales")),
        *((name, ctypes.c_int) for name in ("inputs", "offset", "count", "slots", "blocks")),
    )


class Kernels(ProductKernels):
    """All FP8 product kernels, loaded on the current device."""

    clusters: tuple[int, ...]
    """Number of clusters of 1, 2, ... `MAX_CLUSTER` thread blocks of a product that can run at the
    same time."""

    def __init__(self) -> None:
        """Load the kernels from disk, or compile them. Raises `CompileError` or `DriverError` if
        that fails."""
        super().__init__(_NAME, source(), VARIANTS)
        self._rounding = self._module.kernel(ROUNDING, self.processors, ROUNDING_THREADS, 0)
        linear = self._variants[Variant("LINEAR", 64, 1)]
        self.clusters = (
            self.processors,
            *(_clusters_of(linear, size) for size in range(2, MAX_CLUSTER + 1)),
        )

    def round(self, args: RoundArgs) -> None:
        """Queue the rounding of activations to e4m3. As in `multiply`, its thread blocks may start
        early. Raises `DriverError` if the launch fails."""
        warps = args.count * -(-args.blocks // AT_ONCE)
        blocks = min(-(-warps // (ROUNDING_THREADS // 32)), 8 * self.processors)
        self._rounding.launch(args, blocks, overlaps=True)


def _clusters_of(kernel: Kernel, size: int) -> int:
    """Return the number of clusters of `size` blocks that can run at the same time. It is 0 if the
    GPU, or the part of it that is available, has no such clusters."""
    try:
        return kernel.max_clusters(size)
    except DriverError:
        return 0


@functools.cache
def log_fallback(reason: str) -> None:
    """Log a warning, once for each reason, that the Triton kernels are used instead."""
    log.warning(
        "FP8 products with many rows use the Triton kernels, which take up to 2.4 times as long: "
        "%s",
        reason,
    )


def optional_kernels(capability: tuple[int, int]) -> OptionalKernels[Kernels]:
    """Return the FP8 product kernels of a device, which are loaded when they are first needed."""
    return OptionalKernels(capability, Kernels, log_fallback)


class Matrix:
    """An FP8 matrix, or the stacked matrices of all experts, and the tensor map through which
    kernels read it."""

    def __init__(self, packed: Packed) -> None:
        """Encode the tensor map for the copy engine (TMA). Raises `DriverError` if that fails."""
        self.packed = packed
        self.outputs, width = packed.weight.shape[-2:]
        self.blocks = packed.scales.shape[-1]
        rows = packed.weight.numel() // width
        box = (BLOCK, BLOCK)
        address = packed.weight.data_ptr()
        self.map = tensor_map("UINT8", address, (width, rows), (width,), box)


def arguments_of(
    matrix: Matrix, variant: Variant, rows: Rows, row_tiles: int, y: torch.Tensor, count: int
) -> Args:
    """Return the parameters of a product kernel. The kernel computes `row_tiles` tiles of rows and
    stores only the first `count` rows, or the rows of `count` pairs."""
    args = Args(
        scales=matrix.packed.scales.data_ptr(),
        rows=rows.values.data_ptr(),
        row_scales=rows.scales.data_ptr(),
        y=y.data_ptr(),
        slots=rows.scales.shape[1],
        count=count,
        outputs=matrix.outputs,
        group=matrix.packed.group,
        blocks=matrix.blocks,
        row_tiles=row_tiles,
        cluster=1,
        band=row_tiles,
        output_tiles=output_tiles(variant, matrix.outputs),
    )
    ctypes.memmove(args.weight, matrix.map, MAP_BYTES)
    return args


# -- rows -----------------------------------------------------------------------------------------


def memory_for(x: torch.Tensor, packed: Packed, slots: int) -> Rows | None:
    """Return memory for the rounded rows of `x`, (rows, inputs), in `slots` slots, or None if they
    need padding."""
    blocks = packed.scales.shape[-1]
    if packed.offset or blocks * BLOCK != x.shape[1]:
        return None
    return Rows.empty_swizzled(blocks, slots, x.device)


def quantize(kernels: Kernels, x: torch.Tensor, packed: Packed, slots: int) -> Rows:
    """Return `x`, bfloat16 (rows, inputs), rounded to e4m3 and padded like `packed`.

    The result has room for `slots` rows, and its first rows are those of `x`. Raises `DriverError`
    if the launch fails.
    """
    assert x.is_contiguous()
    blocks = packed.scales.shape[-1]
    rows = Rows.empty_swizzled(blocks, slots, x.device)
    kernels.round(
        RoundArgs(
            x=x.data_ptr(),
            rows=rows.values.data_ptr(),
            scales=rows.scales.data_ptr(),
            inputs=x.shape[1],
            offset=packed.offset,
            count=len(x),
            slots=slots,
            blocks=blocks,
        )
    )
    return rows
