"""The scheduler's limits."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nanoactor.media.units import NO_ENCODER, EncoderLimits


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits that plans observe."""

    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """At least `max_num_seqs`, so that every running sequence fits into every step."""
    max_model_len: int
    depth: int = 2
    """Maximum number of steps in flight."""
    max_depth: int = 0
    """Maximum number of steps in flight while steps are short; at least `depth`."""
    plan_lead: Literal["eager", "late"] = "eager"
    """Plan as soon as the depth allows, or when the runner asks because it is about to run dry."""
    prefix_caching: bool = True
    priority_window: int = 1000
    """Number of later requests that a priority difference of 1 may let pass."""
    encoder: EncoderLimits = NO_ENCODER
    jump_forward: bool = True
    """True if tokens forced by a grammar skip sampling."""
    pooling: str = ""
    """Pooling method, see `PoolingConfig.kind`; empty: none."""
    ranks: int = 1
    """Runners, each of which must hold a mask before a step may name it."""

    def __post_init__(self) -> None:
        """Raise `max_depth` to at least `depth`."""
        object.__setattr__(self, "max_depth", max(self.depth, self.max_depth))
