"""The scheduler's slots and blocks, and the sequences that hold or wait for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanoactor.scheduling.resources.budget import BlockBudget, PageBudget
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingQueues


class Room(NamedTuple):
    """The parts of the scheduler that are needed to admit, queue or preempt a sequence."""

    budget: BlockBudget
    pages: PageBudget
    """The pages of the encoder cache."""
    running: RunningBatch
    waiting: WaitingQueues
    blocks: int
    """Number of all KV-cache blocks."""
    block_size: int

    @property
    def reserved_blocks(self) -> int:
        """Number of free blocks that admissions must leave for running sequences.

        Without this reserve, a preempted sequence would take back the blocks that it had to give
        up. A few more blocks, up to one for each running sequence, avoid another preemption right
        away.
        """
        running = self.running
        if not len(running):
            return 0
        _, starving = running.table.readiness()
        needed = int(np.count_nonzero(starving)) + len(running.starving)
        return needed + min(len(running), self.blocks // 64)

    @property
    def credits(self) -> int:
        """Number of blocks that may be spent on admissions and on copies of sequences: all
        available blocks, less those reserved for running sequences."""
        return self.budget.credits - self.reserved_blocks

    @property
    def head(self) -> Sequence | None:
        """The sequence to admit next; None if no waiting sequence can be admitted."""
        return self.waiting.head(self.pages.credits)
