"""Configuration of the scheduler."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nanoactor.media.units import NO_ENCODER, EncoderLimits


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and options of the scheduler."""

    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Maximum number of tokens in a step; at least `max_num_seqs`, so that every running sequence
    fits into every step."""
    max_model_len: int
    depth: int = 2
    """Maximum number of steps in flight."""
    max_depth: int = 0
    """Maximum number of steps in flight while steps are short; at least `depth`."""
    plan_lead: Literal["eager", "late"] = "eager"
    """When to plan a step: as soon as the depth allows ("eager"), or, while steps are in flight,
    only once the runner requests one because the device is about to go idle ("late")."""
    prefix_caching: bool = True
    priority_window: int = 1000
    """Fewer than this many later requests can overtake a request per unit of priority."""
    encoder: EncoderLimits = NO_ENCODER
    jump_forward: bool = True
    """True if tokens forced by a grammar are appended without sampling."""
    pooling: str = ""
    """Pooling method, see `PoolingConfig.kind`; empty if there is none."""
    ranks: int = 1
    """Number of runners, all of which must hold a mask before a step may use it."""

    def __post_init__(self) -> None:
        """Raise `max_depth` to at least `depth`."""
        object.__setattr__(self, "max_depth", max(self.depth, self.max_depth))
