"""Copies of blocks and slot states (state that layers keep per slot, outside the blocks). The
runners make them before they run the layers of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from nanoactor.messages.engine import Copies


class PendingCopies:
    """Collects copies of blocks and slot states for the next step.

    The runners read all sources before they write any target, so two slots may swap states. If a
    source is itself the target of a queued copy, its original source is copied instead.
    """

    def __init__(self, *, slots: bool) -> None:
        """`slots` is True if layers keep slot states; otherwise `copy_slots` does nothing."""
        self.has_slots = slots
        self._blocks: dict[int, int] = {}
        """Source block of each copy, by target block."""
        self._slots: dict[int, int] = {}
        """Source slot of each copy, by target slot."""

    def copy_block(self, source: int, target: int) -> None:
        """Queue a copy of block `source` into block `target`."""
        self._blocks[target] = self._blocks.get(source, source)

    def copy_slots(self, targets: Iterable[int], sources: Iterable[int]) -> None:
        """Queue copies of slot states. All sources are read as they were before this call."""
        if self.has_slots:
            before = dict(self._slots)
            pairs = zip(targets, sources, strict=True)
            self._slots |= {target: before.get(source, source) for target, source in pairs}

    def drop_blocks(self, targets: Iterable[int]) -> None:
        """Cancel queued copies into these blocks."""
        for target in targets if self._blocks else ():
            self._blocks.pop(target, None)

    def drain(self) -> tuple[Copies | None, Copies | None]:
        """Return and clear the queued copies: (blocks, slot states), each None if there are
        none."""
        taken = _message(self._blocks), _message(self._slots)
        self.clear()
        return taken

    def clear(self) -> None:
        """Cancel all queued copies."""
        self._blocks, self._slots = {}, {}


def _message(sources: Mapping[int, int]) -> Copies | None:
    if not sources:
        return None
    return Copies(np.array([*sources.values()], np.int32), np.array([*sources], np.int32))
