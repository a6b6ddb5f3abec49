"""The scheduler's counters, reported as metrics."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the scheduler started. Tokens and steps are counted when they are planned."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    """Number of tokens sent to the detokenizer."""
    mixed_steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    """Number of sequences that ended with reason "failed", such as those with non-finite logits."""
    preemptions: int = 0
    overruns: int = 0
    """Number of sampled tokens that were dropped, for example because the sequence had already
    ended."""
    sat_out: int = 0
    """Number of times that a sequence skipped a step for lack of a block."""
    device_seconds: float = 0.0

    def count_step(self, prefill_tokens: int, decode_tokens: int, sat_out: int) -> None:
        """Count a planned step with these numbers of tokens; `sat_out` is the number of sequences
        that skip it for lack of a block."""
        self.steps += 1
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens
        self.sat_out += sat_out
        self.mixed_steps += bool(prefill_tokens and decode_tokens)

    def discount_hits(self, prefill_tokens: int) -> None:
        """Subtract prompt tokens that were counted as prefilled but found in the prefix cache."""
        self.prefill_tokens -= prefill_tokens

    def count_abort(self) -> None:
        """Count an aborted request."""
        self.aborted += 1

    def count_overrun(self, tokens: int = 1) -> None:
        """Count sampled tokens that were dropped, such as those after the end of their sequence."""
        self.overruns += tokens
