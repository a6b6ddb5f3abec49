"""What the scheduler knows of one request."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admit, Sampling, Stopping


class Phase(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Holds nothing; new, or preempted."""
    MATCHING = "matching"
    """Has a slot and its credits; the block manager's answer is under way."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and counters. *Known* are tokens whose value the host has seen;
    *scheduled* are positions that planned steps compute, and may be ahead of what is known."""

    uid: int
    rank: tuple[int, int]
    """Lower goes first and is preempted last."""
    tokens: list[int]
    """Prompt and output, as far as known."""
    prompt_length: int
    limit: int
    """How many tokens it may have in all."""
    hashes: NDArray[np.uint8]
    sampling: Sampling
    stopping: Stopping
    phase: Phase = Phase.WAITING
    slot: int = -1
    blocks: int = 0
    shared: int = 0
    """How many of its blocks it found in the prefix cache, and may not give back alone."""
    starved_since: int = 0
    """The first of the steps that it sits out for want of a block; 0 where it does not."""
    target: int = 0
    """How many positions are prefilled before it decodes."""
    scheduled: int = 0
    in_flight: int = 0
    """Rows of planned steps whose results are not back."""
    unanswered: int = 0
    """Matches that the block manager has not answered."""
    introduced: bool = False
    """Whether the runners know its sampling parameters under its present slot."""
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, event: Admit, max_model_len: int, priority_window: int) -> Sequence:
        """A new sequence, from the request as the tokenizer admitted it.

        Priority counts as so many places in the order of arrival, so that nobody is passed by
        more than `priority_window` later requests for each degree of priority between them.
        """
        return cls(
            event.uid,
            (event.uid + event.priority * priority_window, event.uid),
            event.token_ids.tolist(),
            event.prompt_length,
            min(event.prompt_length + event.stopping.max_tokens, max_model_len),
            event.hashes.copy(),
            event.sampling,
            event.stopping,
        )

    @property
    def prefilling(self) -> bool:
        """Whether it runs and has positions left to prefill."""
        return self.phase is Phase.RUNNING and self.scheduled < self.target

    @property
    def decodable(self) -> bool:
        """Whether one more token may be asked for: a step at position p samples token p + 1."""
        return (
            self.phase is Phase.RUNNING
            and self.scheduled >= self.target
            and self.scheduled + 2 <= self.limit
        )

    @property
    def output_length(self) -> int:
        """How many tokens of output are known."""
        return len(self.tokens) - self.prompt_length

    def verdict(self) -> tuple[str, int | None] | None:
        """Whether the newest known token ends it: (finish reason, stop token), or None."""
        token, stopping = self.tokens[-1], self.stopping
        if self.output_length >= stopping.min_tokens:
            if token in stopping.eos_ids:
                return ("stop", None)
            if token in stopping.stop_ids:
                return ("stop", token)
        return ("length", None) if len(self.tokens) >= self.limit else None

    def story(self) -> str:
        """Its counters, for error messages."""
        return (
            f"request {self.uid} ({self.phase.value}, slot {self.slot}): {len(self.tokens)} known, "
            f"{self.scheduled} scheduled of {self.target} to prefill, {self.blocks} blocks, "
            f"{self.in_flight} rows in flight, {self.preemptions} preemptions"
        )
