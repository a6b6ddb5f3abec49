"""What the scheduler knows of one request."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admit, Int32, Sampling, Stopping
from nanoactor.scheduling.table import RunningTable


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
    *scheduled* are positions that planned steps compute, and may be ahead of what is known.

    While it holds a slot, both stand in the slot's row of the table.
    """

    uid: int
    priority_key: tuple[int, int]
    """Lower goes first and is preempted last."""
    table: RunningTable
    kept: Int32
    """Prompt and output as far as known, while it holds no slot."""
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
    last_step: int = 0
    """The last step with a row of it, when it gave its slot up."""
    unanswered: int = 0
    """Matches that the block manager has not answered."""
    introduced: bool = False
    """Whether the runners know its sampling parameters under its present slot."""
    cached_tokens: int = -1
    """What its first match found; negative until then."""
    preemptions: int = 0

    @classmethod
    def of(
        cls, event: Admit, table: RunningTable, max_model_len: int, priority_window: int
    ) -> Sequence:
        """A new sequence, from the request as the tokenizer admitted it.

        Priority counts as so many places in the order of arrival, so that nobody is passed by
        more than `priority_window` later requests for each degree of priority between them.
        """
        return cls(
            event.uid,
            (event.uid + event.priority * priority_window, event.uid),
            table,
            event.token_ids.copy(),
            event.prompt_length,
            min(event.prompt_length + event.stopping.max_tokens, max_model_len),
            event.hashes.copy(),
            event.sampling,
            event.stopping,
        )

    @property
    def length(self) -> int:
        """How many tokens are known."""
        return int(self.table.known[self.slot]) if self.slot >= 0 else len(self.kept)

    @property
    def output_length(self) -> int:
        """How many tokens of output are known."""
        return self.length - self.prompt_length

    @property
    def tokens(self) -> Int32:
        """The known tokens; a view while it holds a slot."""
        return self.table.tokens[self.slot, : self.length] if self.slot >= 0 else self.kept

    @property
    def target(self) -> int:
        """How many positions are prefilled before it decodes; it holds a slot."""
        return int(self.table.targets[self.slot])

    @property
    def scheduled(self) -> int:
        """How many positions the planned steps compute; 0 where it holds no slot."""
        if self.slot < 0:
            return 0
        self.table.settle()
        return int(self.table.scheduled[self.slot])

    @property
    def prefilling(self) -> bool:
        """Whether it runs and has positions left to prefill."""
        return self.phase is Phase.RUNNING and self.scheduled < self.target

    @property
    def decodable(self) -> bool:
        """Whether one more token may be asked for."""
        return self.slot >= 0 and bool(self.table.decodable()[self.slot])

    def in_flight(self, completed: int) -> bool:
        """Whether a planned step past `completed` has a row of it."""
        if self.slot >= 0:
            self.table.settle()
            return int(self.table.last_steps[self.slot]) > completed
        return self.last_step > completed

    def enter(self, slot: int, blocks: int) -> None:
        """Take a slot and so many blocks."""
        self.table.enter(self, slot, blocks)
        self.slot, self.blocks, self.shared = slot, blocks, 0
        self.introduced = False

    def leave(self) -> None:
        """Give the slot up, and keep what is known."""
        self.table.settle()
        self.kept = self.tokens.copy()
        self.last_step = int(self.table.last_steps[self.slot])
        self.table.leave(self.slot)
        self.slot, self.blocks, self.starved_since = -1, 0, 0

    def take(self, token: int) -> int:
        """Append a token; returns its index in the output."""
        index = self.output_length
        if self.slot >= 0:
            table, slot = self.table, self.slot
            table.tokens[slot, table.known[slot]] = token
            table.forget_columns()
            table.known[slot] += 1
        else:
            self.kept = np.append(self.kept, np.int32(token))
        return index

    def verdict(self) -> tuple[str, int | None] | None:
        """Whether the newest known token ends it: (finish reason, stop token), or None."""
        tokens, stopping = self.tokens, self.stopping
        token = int(tokens[-1])
        if len(tokens) - self.prompt_length >= stopping.min_tokens:
            if token in stopping.eos_ids:
                return ("stop", None)
            if token in stopping.stop_ids:
                return ("stop", token)
        return ("length", None) if len(tokens) >= self.limit else None

    def describe(self) -> str:
        """Its counters, for error messages."""
        return (
            f"request {self.uid} ({self.phase.value}, slot {self.slot}): {self.length} known of at "
            f"most {self.limit}, {self.scheduled} scheduled, {self.blocks} blocks, "
            f"{self.preemptions} preemptions"
        )
