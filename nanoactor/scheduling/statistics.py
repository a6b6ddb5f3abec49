"""Counters of the scheduler."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    """Tokens that sequences got."""
    mixed_steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    """Sequences whose logits were not finite, or that had read what such a one computed."""
    preemptions: int = 0
    overruns: int = 0
    """Tokens of sequences that had ended, by themselves or aborted, and dropped."""
    sat_out: int = 0
    """Decode rows left out of a step for want of a block."""
    device_seconds: float = 0.0
