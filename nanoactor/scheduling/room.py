"""What sequences go on with: slots, blocks, and places in the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanoactor.scheduling.budget import BlockBudget
from nanoactor.scheduling.queues import RunningBatch, WaitingLine
from nanoactor.scheduling.sequence import Sequence


class Room(NamedTuple):
    """The supply of slots and blocks, and those who have or want some."""

    budget: BlockBudget
    running: RunningBatch
    waiting: WaitingLine
    pages: Callable[[], int]
    """Counts the pages of the encoder cache that the queue may spend."""
    reserve: Callable[[], int]
    """Counts the blocks that are left for those that run."""
    block_size: int

    @property
    def credits(self) -> int:
        """Return how many blocks may be spent on copies."""
        return self.budget.credits - self.reserve()

    @property
    def head(self) -> Sequence | None:
        """Return who comes next in the queue; None where nobody may."""
        return self.waiting.head(self.pages())
