"""Parameters, tiles, shared memory and launches of the product kernels in CUDA C++ (tiles.cuh)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from nanoactor.models.devices.cuda.kernels import nvrtc
from nanoactor.models.devices.cuda.kernels.driver import MAP_BYTES, Module
from nanoactor.models.devices.cuda.kernels.nvrtc import MACHINE_SOURCE

BLOCK_BYTES = 128
"""Number of bytes of a row, or of an output's weights, in a stage."""
SHARED_LIMIT = 228_352
"""Maximum size in bytes of a block's shared memory. It is 4 KiB below the hardware limit, which
leaves room for blocks of the previous kernel."""
BAND = 4
"""Number of consecutive tiles of rows of experts whose outputs are all computed before the next
ones, so that their rows and weights stay in the L2 cache. Measured on an H200."""
_ALIGNMENT_BYTES = 1024
_MAX_STAGES = 12

Epilogue = Literal["LINEAR", "SWIGLU", "GATHERED", "WEIGHTED"]


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One of the compiled variants of a product kernel."""

    epilogue: Epilogue
    tokens: int
    """Number of rows (tokens) of a tile."""
    halves: int
    """Number of groups of 128 outputs in a tile, 1 or 2. With "SWIGLU" or "GATHERED", these are 128
    gates and the 128 corresponding ups."""

    @property
    def name(self) -> str:
        """Name of the kernel in the CUDA source."""
        return f"{self.epilogue.lower()}_{self.tokens}_{self.halves}"

    @property
    def outputs(self) -> int:
        """Number of outputs of a tile."""
        return 128 if self.is_swiglu else 128 * self.halves

    @property
    def is_swiglu(self) -> bool:
        """True if the results are silu(gate) * up."""
        return self.epilogue in ("SWIGLU", "GATHERED")

    @property
    def threads(self) -> int:
        """Number of threads of a block. One group of 128 threads copies. Each other group
        multiplies 64 rows, or half of the outputs of a tile of 64 rows."""
        return 128 * (1 + max(2, self.tokens // 64))

    @property
    def _stage_bytes(self) -> int:
        """Size in bytes of the buffers for one block of inputs of a tile: its part of the matrix,
        the rows, the rows' scales (in FP8), and two barriers."""
        return (128 * self.halves + self.tokens) * BLOCK_BYTES + 4 * self.tokens + 16

    @property
    def stages(self) -> int:
        """Number of blocks of inputs that are buffered in shared memory at a time."""
        available_bytes = SHARED_LIMIT - _ALIGNMENT_BYTES - 4 * self.tokens - 16
        return min(_MAX_STAGES, available_bytes // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Size of a block's shared memory in bytes."""
        return _ALIGNMENT_BYTES + 4 * self.tokens + 16 + self.stages * self._stage_bytes

    @property
    def launch_bounds(self) -> int:
        """Number of threads among which the compiler divides the registers of a multiprocessor.

        For tiles of 64 rows, this is more than a thread block has, so that blocks of the previous
        kernel can run at the same time. Larger tiles need all registers.
        """
        return self.threads if self.tokens > 64 else 512


class Args(ctypes.Structure):
    """Parameters of a product kernel; mirror of `Args` in `tiles.cuh`, whose size is a multiple of
    64 bytes."""

    _fields_ = (
        ("weight", ctypes.c_ubyte * MAP_BYTES),
        *((name, ctypes.c_void_p) for name in (
            "scales", "rows", "row_scales", "bias", "y", "y_scales", "owners", "used", "pairs",
            "shares",
        )),
        *((name, ctypes.c_int) for name in (
            "slots", "count", "outputs", "group", "blocks", "row_tiles", "output_tiles", "cluster",
            "band", "chosen",
        )),
        ("padding", ctypes.c_ubyte * 8),
    )  # fmt: skip


def output_tiles(variant: Variant, outputs: int) -> int:
    """Return the number of tiles of a matrix with `outputs` outputs."""
    return -(-outputs // (variant.outputs * (1 + variant.is_swiglu)))


def source_of(
    product: Path, variants: Sequence[Variant], constants: str = "", machine: str | None = None
) -> str:
    """Return the CUDA source of the kernels in the file `product`, one for each variant, after the
    source text `constants`. `machine` is source text that replaces the instruction wrappers; None
    means `machine.cuh`."""
    entries = [
        f'extern "C" __global__ void __launch_bounds__({v.launch_bounds}, 1) '
        f"{v.name}(const __grid_constant__ Args a) "
        f"{{ run<{v.tokens}, {v.halves}, {v.stages}, {v.epilogue}>(a); }}"
        for v in variants
    ]
    parts = [machine or MACHINE_SOURCE.read_text(), constants]
    for file in (MACHINE_SOURCE.with_name("tiles.cuh"), product):
        parts += [f'#line 1 "{file.name}"', file.read_text()]
    return "\n".join([*parts, *entries, ""])


class ProductKernels:
    """The variants of a product kernel, loaded on the current device."""

    def __init__(self, name: str, source: str, variants: Sequence[Variant]) -> None:
        """Load the machine code of `source` from disk, or compile it; compiler messages call it
        `name`.cu. Raises `CompileError` or `DriverError` if that fails."""
        device = torch.cuda.current_device()
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._module = Module(nvrtc.load_or_compile(source, name).cubin)
        self._variants = {
            variant: self._module.kernel(
                variant.name, self.processors, variant.threads, variant.shared_bytes
            )
            for variant in variants
        }

    def multiply(self, variant: Variant, args: Args, blocks: int) -> None:
        """Queue a product with `blocks` thread blocks, in clusters of `args.cluster`.

        They may start before the previous kernel has ended. Raises `DriverError` if the launch
        fails.
        """
        self._variants[variant].launch(args, blocks, overlaps=True, cluster=args.cluster)
