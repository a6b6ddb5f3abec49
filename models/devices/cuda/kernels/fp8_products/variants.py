"""The variants of the FP8 product kernel, and the choice of a variant and of a division into thread
blocks for each product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from nanoactor.models.devices.cuda.kernels.tiles import Variant, source_of

BLOCK = 128
"""Number of inputs that share a scale. These kernels support no other number."""
GROUP_MULTIPLE = 64
"""Number of consecutive outputs that must share a scale. The number of outputs per scale must be a
multiple of it."""
ROUNDING, ROUNDING_THREADS = "round_rows", 256
"""Name and number of threads of the kernel that rounds activations to e4m3."""
AT_ONCE = 8
"""Number of blocks of inputs that one warp rounds."""
TRITON_MAX_ROWS = 32
"""Maximum number of rows for which a product is faster in Triton (docs/gpu_measurements.md)."""
TRITON_MAX_MLP_ROWS = 16
"""Maximum number of rows for which a feed-forward operator is faster in Triton."""
_MIN_PAIRS, _LARGE_TILE_PAIRS = 32, 96
"""Mean numbers of pairs per expert from which these kernels are faster than those in Triton, and
from which tiles of 128 rows are faster than tiles of 64. Measured on an H200."""
MAX_CLUSTER = 8
"""Maximum number of thread blocks that share a tile. All whole GPUs of compute capability 9.0
support clusters of this size."""
_MIN_STAGES = 2
"""Minimum number of stages (blocks of inputs of a tile) of each block that shares a tile."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Costs:
    """Times in microseconds, measured on an H200."""

    stage: float
    """Time of a stage (a block of inputs of a tile) if few multiprocessors are busy."""
    contended_stage: float
    """Time of a stage if all multiprocessors read different weights, and share the memory's
    bandwidth."""
    combine: float
    """Time in which the sums of a tile are added, if several thread blocks share it and all
    multiprocessors are busy."""


_COSTS = {
    Variant("LINEAR", 64, 1): _Costs(0.29, 0.49, 4.0),
    Variant("LINEAR", 128, 1): _Costs(0.46, 0.52, 6.0),
    Variant("LINEAR", 128, 2): _Costs(0.78, 1.0, 11.0),
    Variant("LINEAR", 192, 1): _Costs(0.6, 0.7, 7.0),
}
_SWIGLU_COSTS = {
    Variant("SWIGLU", 64, 2): _Costs(0.5, 1.15, 0.0),
    Variant("SWIGLU", 128, 2): _Costs(0.8, 0.85, 0.0),
}
_LAUNCHES_COST = 4.0
"""Time in microseconds of starting the kernels of SwiGLU and of the rounding after it."""
_BYTES_PER_MICROSECOND = 4.3e6
"""Bandwidth of the memory."""
VARIANTS = (
    *_COSTS,
    *_SWIGLU_COSTS,
    *(Variant("GATHERED", tokens, 2) for tokens in (64, 128)),
    *(Variant("WEIGHTED", tokens, 2) for tokens in (64, 128)),
)


def source(machine: str | None = None) -> str:
    """Return the CUDA source of all kernels. `machine` is source text that replaces the instruction
    wrappers; None means `machine.cuh`."""
    constants = f"constexpr int AT_ONCE = {AT_ONCE}, ROUNDING_WARPS = {ROUNDING_THREADS // 32};"
    rounding = (
        f'extern "C" __global__ void __launch_bounds__({ROUNDING_THREADS}) '
        f"{ROUNDING}(const __grid_constant__ RoundArgs a) {{ round_all(a); }}\n"
    )
    product = Path(__file__).with_name("product.cu")
    return source_of(product, VARIANTS, constants, machine) + rounding


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """The division of a dense product among thread blocks."""

    variant: Variant
    row_tiles: int
    output_tiles: int
    cluster: int
    """Number of thread blocks that share a tile, each with a part of its stages (blocks of
    inputs). If it is 1, each block computes whole tiles."""
    blocks: int
    """Number of thread blocks in the grid."""

    @property
    def slots(self) -> int:
        """Number of rows of all tiles, including those that pad the last tile."""
        return self.row_tiles * self.variant.tokens


@functools.lru_cache(4096)
def choose_division(rows: int, outputs: int, inputs: int, clusters: tuple[int, ...]) -> Division:
    """Return the division with the lowest estimated time.

    The product has `rows` rows and a matrix of `outputs` outputs and `inputs` blocks of inputs.
    `clusters` contains the numbers of clusters of 1, 2, ... blocks that can run at the same time.
    """
    return min(_options(rows, outputs, inputs, clusters), key=lambda option: option[0])[1]


def _stage_cost(variant: Variant, blocks: int, row_tiles: int, processors: int) -> float:
    """Return the estimated time in microseconds of a stage if `blocks` blocks run."""
    costs = (_COSTS | _SWIGLU_COSTS)[variant]
    # The memory's bandwidth limits tiles of 64 rows, and blocks with other rows need no more of it
    # if they read the same weights at about the same time. Larger tiles have other limits.
    readers = min(blocks, 1.5 * blocks / row_tiles) if variant.tokens == 64 else blocks
    return max(costs.stage, costs.contended_stage * readers / processors)


def _whole_tiles_time(
    variant: Variant, tiles: int, row_tiles: int, inputs: int, processors: int
) -> float:
    """Return the estimated time in microseconds of a product whose blocks compute whole tiles."""
    blocks = min(processors, tiles)
    stage_cost = _stage_cost(variant, blocks, row_tiles, processors)
    return -(-tiles // processors) * inputs * stage_cost


def _options(
    rows: int, outputs: int, inputs: int, clusters: tuple[int, ...]
) -> Iterator[tuple[float, Division]]:
    """Yield the possible divisions and their estimated times in microseconds."""
    processors = clusters[0]
    for variant, costs in _COSTS.items():
        row_tiles = -(-rows // variant.tokens)
        output_tiles = -(-outputs // variant.outputs)
        tiles = row_tiles * output_tiles
        blocks = min(processors, tiles)
        time = _whole_tiles_time(variant, tiles, row_tiles, inputs, processors)
        yield time, Division(variant, row_tiles, output_tiles, 1, blocks)
        for cluster in range(2, min(len(clusters), inputs // _MIN_STAGES) + 1):
            if tiles > clusters[cluster - 1]:
                break
            blocks = cluster * tiles
            time = -(-inputs // cluster) * _stage_cost(variant, blocks, row_tiles, processors)
            time += costs.combine * blocks / processors
            yield time, Division(variant, row_tiles, output_tiles, cluster, blocks)


@functools.lru_cache(4096)
def choose_swiglu_variant(
    rows: int, inner: int, inputs: int, clusters: tuple[int, ...]
) -> Variant | None:
    """Return the variant for the gate and up product of a dense layer, or None if a product and
    separate kernels for SwiGLU and rounding are estimated to be faster.

    There are `rows` rows, `inner` gates, and `inputs` blocks of inputs; `clusters` is as in
    `choose_division`. With few gates, for example with tensor parallelism, too few thread blocks
    would have a tile.
    """
    variant = Variant("SWIGLU", 64 if rows <= 64 else 128, 2)
    row_tiles = -(-rows // variant.tokens)
    tiles = row_tiles * -(-inner // variant.outputs)
    time = _whole_tiles_time(variant, tiles, row_tiles, inputs, clusters[0])
    product_time = min(time for time, _ in _options(rows, 2 * inner, inputs, clusters))
    # Gates and ups are read, and their products written and read again, in 2 bytes, then rounded.
    copied_bytes = rows * inner * (2 * 2 + 2 + 2 + 1)
    separate_time = product_time + _LAUNCHES_COST + copied_bytes / _BYTES_PER_MICROSECOND
    return variant if time <= separate_time else None


def unsupported_reason(block: int, group: int) -> str | None:
    """Return why the kernels do not support a matrix in which `block` inputs of `group` outputs
    share a scale, or None if they do."""
    if block != BLOCK:
        return f"blocks have {block} inputs instead of {BLOCK}"
    if group % GROUP_MULTIPLE:
        return f"the scales differ within a group of {GROUP_MULTIPLE} outputs"
    return None


def choose_variants(pairs: int, experts: int) -> tuple[Variant, Variant] | None:
    """Return the variants for the gate and up product and for the down product, or None if the
    Triton kernels are faster.

    There are `pairs` token-expert pairs and `experts` experts.
    """
    if pairs < _MIN_PAIRS * experts:
        return None
    tokens = 64 if pairs < _LARGE_TILE_PAIRS * experts else 128
    return Variant("GATHERED", tokens, 2), Variant("WEIGHTED", tokens, 2)
