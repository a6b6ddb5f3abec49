"""Configuration of the scheduler."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nanoactor.media.units import NO_ENCODER, EncoderLimits


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and options of the scheduler. `blocks` and `block_size` are the number of KV-cache
    blocks and the tokens per block."""

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
    """Maximum number of steps in flight while steps are shorter than the host's work for a step; at
    least `depth`."""
    plan_lead: Literal["eager", "late"] = "eager"
    """When to plan a step. "eager": as soon as the depth allows. "late": while steps are in flight,
    only when the runner requests one because the device is about to become idle."""
    prefix_caching: bool = True
    priority_window: int = 1000
    """Weight of priorities in the queue. Of two requests whose priorities differ by d, the more
    urgent one goes first if it arrives less than `d * priority_window` places after the other."""
    encoder: EncoderLimits = NO_ENCODER
    jump_forward: bool = True
    """True if tokens are appended without sampling where the grammar allows only one
    continuation."""
    pooling: str = ""
    """The model's pooling method, as in `PoolingConfig.kind`; empty if the model does not pool."""
    ranks: int = 1
    """Number of tensor-parallel ranks. A step uses a grammar's token mask only once every rank has
    received the mask."""

    def __post_init__(self) -> None:
        """Set `max_depth` to `depth` if it is smaller."""
        object.__setattr__(self, "max_depth", max(self.depth, self.max_depth))
