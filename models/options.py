"""Options for each kind of device; imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

GRAPH_MODES = ("auto", "eager", "npugraph", "max-autotune", "reduce-overhead")
ATTENTION_LAYOUTS = ("tnd", "bnsd")
WEIGHT_FORMATS = ("nd", "nz")
FusedSampling = Literal["every", "all", "greedy", "none"]
"""For which rows a device's `sample_rows` chooses, but for those with masked ids: for every row,
for all but those with a top-k of more than `limits.CANDIDATES`, for greedy ones alone, or for
none."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """All of it is about Ascend NPUs, and other devices ignore it."""

    graph_mode: str = "auto"
    """Execution mode of decode steps, one of `GRAPH_MODES`."""
    attention_layout: str = "tnd"
    """Query layout of fused attention: packed tokens, or a padded batch."""
    weight_format: str = "nd"
    """Row by row, or in the fractal blocks that matrix units read (NZ)."""
    graph_cache_dir: str | None = None
    """Directory in which compiled graphs are kept between starts."""
