"""Options for each kind of device; does not import torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

GRAPH_MODES = ("auto", "eager", "npugraph", "max-autotune", "reduce-overhead")
ATTENTION_LAYOUTS = ("tnd", "bnsd")
WEIGHT_FORMATS = ("nd", "nz")
FusedSampling = Literal["every", "all", "greedy", "none"]
"""Rows for which a device's `sample_rows` chooses, except those with masked ids: every row, all but
those with a top-k of more than `limits.CANDIDATES`, greedy ones alone, or none."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options for Ascend NPUs; other devices ignore them."""

    graph_mode: str = "auto"
    """Execution mode of decode steps, one of `GRAPH_MODES`."""
    attention_layout: str = "tnd"
    """Query layout of fused attention: packed tokens, or a padded batch."""
    weight_format: str = "nd"
    """Row by row, or in the fractal blocks that matrix units read (NZ)."""
    graph_cache_dir: str | None = None
    """Directory in which compiled graphs persist between starts."""
