"""A small batch, separate from the real one, in which a runner lays out a dummy step to warm up the
CPU caches."""

from __future__ import annotations

import functools

from nanoactor.messages.engine import Step
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from nanoactor.runner.batch.inputs import Update
from nanoactor.scheduling.rehearsal import first_step


class RehearsalBatch:
    """A small `HostBatch`, created on first use, that lays out the same dummy step each time."""

    def __init__(self, traits: BatchTraits, block_size: int) -> None:
        self._traits, self._block_size = traits, block_size

    @functools.cached_property
    def _step(self) -> Step:
        return first_step(self._block_size)

    @functools.cached_property
    def _batch(self) -> HostBatch:
        return HostBatch(
            int(self._step.rows.slots.max()) + 1, len(self._step.table_blocks), self._traits
        )

    def update(self) -> Update:
        """Lay out a dummy step that computes a whole prompt."""
        return self._batch.update(self._step)
