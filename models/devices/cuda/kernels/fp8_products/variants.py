"""The kernels of FP8 products, their shared memory, and the choice of kernel and division for each
product."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from nanoactor.models.devices.cuda.kernels.nvrtc import MACHINE_SOURCE

BLOCK = 128
"""Number of inputs that share a scale, the only one that these kernels support."""
THREADS = 384
"""Number of threads of a block: one group of 128 copies, two groups multiply."""
ROUNDING, ROUNDING_THREADS = "round_rows", 256
"""Name and number of threads of the kernel that rounds activations."""
AT_ONCE = 8
"""Number of blocks of inputs that a warp rounds."""
TRITON_MAX_ROWS = 64
"""Maximum number of rows for which the kernels in Triton are faster
(docs/gpu_measurements.md)."""
_MIN_PAIRS, _LARGE_TILE_PAIRS = 32, 128
"""Mean number of pairs per expert from which these kernels are faster than those in Triton, and
from which tiles of 128 rows are faster than tiles of 64, on an H200."""
SHARED_LIMIT = 228_352
"""Maximum shared memory of a block in bytes: 4 KB less than it may have, which leaves room for
blocks of the previous kernel."""
_ALIGNMENT_BYTES = 1024
_MAX_STAGES = 12
_MIN_UNITS = 4
"""Minimum number of stages of a block."""

Epilogue = Literal["LINEAR", "SWIGLU", "WEIGHTED"]


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One of the kernels."""

    epilogue: Epilogue
    tokens: int
    """Number of rows of a tile."""
    halves: int
    """Number of groups of 128 outputs in a tile, 1 or 2. With "SWIGLU", these are 128 gates and
    their ups."""

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return f"{self.epilogue.lower()}_{self.tokens}_{self.halves}"

    @property
    def outputs(self) -> int:
        """Return the number of outputs of a tile."""
        return 128 if self.epilogue == "SWIGLU" else 128 * self.halves

    @property
    def _stage_bytes(self) -> int:
        """Return the size of a stage in bytes: the matrix, the rows, their scales and two
        barriers."""
        return (128 * self.halves + self.tokens) * BLOCK + 4 * self.tokens + 16

    @property
    def stages(self) -> int:
        """Return the number of stages that fit into shared memory."""
        available_bytes = SHARED_LIMIT - _ALIGNMENT_BYTES - 4 * self.tokens - 16
        return min(_MAX_STAGES, available_bytes // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Return the size of shared memory in bytes."""
        return _ALIGNMENT_BYTES + 4 * self.tokens + 16 + self.stages * self._stage_bytes

    @property
    def launch_bounds(self) -> int:
        """Return the number of threads among which registers are divided: more than a block has, so
        that the block fits next to blocks of the previous kernel. Tiles of 128 rows need all
        registers."""
        return THREADS if self.tokens == 128 else 512


_STAGE_AND_COMBINE_COSTS = {
    Variant("LINEAR", 64, 1): (0.48, 6.0),
    Variant("LINEAR", 128, 1): (0.72, 12.0),
    Variant("LINEAR", 128, 2): (1.19, 20.0),
}
"""Times in microseconds for a stage, and for adding the parts of a tile that several blocks
compute, on an H200."""
VARIANTS = (
    *_STAGE_AND_COMBINE_COSTS,
    *(Variant(epilogue, tokens, 2) for epilogue in ("SWIGLU", "WEIGHTED") for tokens in (64, 128)),
)


def source(machine: str | None = None) -> str:
    """Return the source of all kernels. `machine` replaces the source of the instruction
    wrappers."""
    entries = [
        f'extern "C" __global__ void __launch_bounds__({v.launch_bounds}, 1) '
        f"{v.name}(const __grid_constant__ Args a) "
        f"{{ run<{v.tokens}, {v.halves}, {v.stages}, {v.epilogue}>(a); }}"
        for v in VARIANTS
    ]
    entries.append(
        f'extern "C" __global__ void __launch_bounds__({ROUNDING_THREADS}) '
        f"{ROUNDING}(const __grid_constant__ RoundArgs a) {{ round_all(a); }}"
    )
    product = MACHINE_SOURCE.parent / "fp8_products" / "product.cu"
    constants = (
        f"constexpr int BLOCK = {BLOCK}, AT_ONCE = {AT_ONCE}, "
        f"ROUNDING_WARPS = {ROUNDING_THREADS // 32};"
    )
    parts = [machine or MACHINE_SOURCE.read_text(), constants]
    parts += [f'#line 1 "{product.name}"', product.read_text()]
    return "\n".join([*parts, *entries, ""])


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """The division of a dense product among blocks."""

    variant: Variant
    row_tiles: int
    output_tiles: int
    units: int
    """Number of stages that each block computes, if blocks may begin or end in the middle of a
    tile; 0 if each block computes whole tiles."""
    blocks: int
    """Number of blocks in the grid."""


@functools.lru_cache(4096)
def choose_division(rows: int, outputs: int, inputs: int, processors: int) -> Division:
    """Choose the division with the lowest estimated time for `rows` rows and a matrix of `outputs`
    outputs and `inputs` blocks of inputs, on `processors` multiprocessors."""
    options = []
    for variant, (stage_cost, combine_cost) in _STAGE_AND_COMBINE_COSTS.items():
        row_tiles = -(-rows // variant.tokens)
        output_tiles = -(-outputs // variant.outputs)
        tiles = row_tiles * output_tiles
        whole_tiles_time = -(-tiles // processors) * inputs * stage_cost
        options.append(
            (
                whole_tiles_time,
                Division(variant, row_tiles, output_tiles, 0, min(processors, tiles)),
            )
        )
        if tiles < processors:
            units = max(-(-tiles * inputs // processors), min(_MIN_UNITS, inputs))
            blocks = -(-tiles * inputs // units)
            division = Division(variant, row_tiles, output_tiles, units, blocks)
            options.append((units * stage_cost + combine_cost, division))
    return min(options, key=lambda option: option[0])[1]


def choose_variants(pairs: int, experts: int) -> tuple[Variant, Variant] | None:
    """Choose the kernels of both products for `pairs` token-expert pairs over `experts` experts.
    Return None if the kernels in Triton are faster."""
    if pairs < _MIN_PAIRS * experts:
        return None
    tokens = 64 if pairs < _LARGE_TILE_PAIRS * experts else 128
    return Variant("SWIGLU", tokens, 2), Variant("WEIGHTED", tokens, 2)
