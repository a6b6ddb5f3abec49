"""The scheduler's slots and blocks, and the sequences that hold or wait for them, for use by
features."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingQueues


class Room(NamedTuple):
    """The parts of the scheduler that features need to admit or queue a sequence."""

    budget: BlockBudget
    running: RunningBatch
    waiting: WaitingQueues
    available_pages: Callable[[], int]
    """Function that returns the number of encoder-cache pages that admissions may spend."""
    reserved_blocks: Callable[[], int]
    """Function that returns the number of blocks to reserve for running sequences."""
    block_size: int

    @property
    def credits(self) -> int:
        """Number of blocks that may be spent on copies of sequences: all available blocks, less
        those reserved for running sequences."""
        return self.budget.credits - self.reserved_blocks()

    @property
    def head(self) -> Sequence | None:
        """The sequence to admit next; None if no waiting sequence can be admitted."""
        return self.waiting.head(self.available_pages())
