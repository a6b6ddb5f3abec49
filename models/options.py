"""Device options; imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

GRAPH_MODES = ("auto", "eager", "npugraph", "max-autotune", "reduce-overhead")
ATTENTION_LAYOUTS = ("tnd", "bnsd")
WEIGHT_FORMATS = ("nd", "nz")
FusedSampling = Literal["all", "bounded_top_k", "greedy", "none"]
"""Rows that a device's `sample_rows` supports: all, those without a top-k above
`limits.CANDIDATES`, only greedy ones, or none. Rows with masked ids are never supported."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options for Ascend NPUs; other devices ignore them."""

    graph_mode: str = "auto"
    """Execution mode of decode steps, one of `GRAPH_MODES`."""
    attention_layout: str = "tnd"
    """Query layout of fused attention: packed tokens (TND), or a padded batch (BNSD)."""
    weight_format: str = "nd"
    """Weight layout: row by row (ND), or in the fractal blocks that matrix units read (NZ)."""
    graph_cache_dir: str | None = None
    """Directory in which compiled graphs are kept across restarts."""
