"""The supply of slots and blocks, and the sequences that hold or wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingQueues


class Room(NamedTuple):
    """The parts of the scheduler that features need to place a sequence."""

    budget: BlockBudget
    running: RunningBatch
    waiting: WaitingQueues
    available_pages: Callable[[], int]
    """Returns the number of pages of the encoder cache that admissions may spend."""
    reserved_blocks: Callable[[], int]
    """Returns the number of blocks to reserve for running sequences."""
    block_size: int

    @property
    def credits(self) -> int:
        """Return the number of blocks that copies may spend."""
        return self.budget.credits - self.reserved_blocks()

    @property
    def head(self) -> Sequence | None:
        """Return the sequence that is admitted next; None if there is none."""
        return self.waiting.head(self.available_pages())
