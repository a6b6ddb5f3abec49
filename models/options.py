"""Options of devices. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

GRAPH_MODES = ("auto", "eager", "npugraph", "max-autotune", "reduce-overhead")
ATTENTION_LAYOUTS = ("tnd", "bnsd")
WEIGHT_FORMATS = ("nd", "nz")
FusedSampling = Literal["all", "bounded_top_k", "greedy", "none"]
"""Rows that a device's `sample_rows` can sample.

"all", "bounded_top_k" (greedy rows, and rows without a top-k or with one of at most
`limits.CANDIDATES`), "greedy" (rows with temperature 0) or "none". Rows with masked ids, penalties
or other logit rules are never supported.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options for Ascend NPUs. Other devices ignore them."""

    graph_mode: str = "auto"
    """Execution mode of decode steps; one of `GRAPH_MODES`."""
    attention_layout: str = "tnd"
    """Query layout of fused attention: "tnd" for packed tokens, "bnsd" for a padded batch."""
    weight_format: str = "nd"
    """Layout of weights: "nd" for row by row, "nz" for the fractal blocks that matrix units
    read."""
    graph_cache_dir: str | None = None
    """Directory in which compiled graphs are kept across restarts; None for one in the user's cache
    directory."""
