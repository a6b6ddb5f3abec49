"""Copies that the runners make before they run the layers of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from nanoactor.messages.engine import Copies


class PendingCopies:
    """Copies of blocks and of the layers' slot states that were queued since the last step.

    The runners read all sources before they write any target, so two slots may swap. A source that
    is a copy itself is replaced by its own source.
    """

    def __init__(self, *, slots: bool) -> None:
        """`slots` means that layers keep state by slot; otherwise copies of slots are ignored."""
        self.has_slots = slots
        self._blocks: dict[int, int] = {}
        """Source block of each target block."""
        self._slots: dict[int, int] = {}
        """Source slot of each target slot."""

    def copy_block(self, source: int, target: int) -> None:
        """Queue the copy of a block."""
        self._blocks[target] = self._blocks.get(source, source)

    def copy_slots(self, targets: Iterable[int], sources: Iterable[int]) -> None:
        """Queue copies of slots. All sources are read as they are before this call."""
        if self.has_slots:
            before = dict(self._slots)
            pairs = zip(targets, sources, strict=True)
            self._slots |= {target: before.get(source, source) for target, source in pairs}

    def drop_blocks(self, targets: Iterable[int]) -> None:
        """Cancel the copies into these blocks."""
        for target in targets if self._blocks else ():
            self._blocks.pop(target, None)

    def drain(self) -> tuple[Copies | None, Copies | None]:
        """Return and clear the copies of blocks and of slots; each is None if there are none."""
        taken = _message(self._blocks), _message(self._slots)
        self.clear()
        return taken

    def clear(self) -> None:
        """Cancel the copies that `drain` has not returned."""
        self._blocks, self._slots = {}, {}


def _message(sources: Mapping[int, int]) -> Copies | None:
    if not sources:
        return None
    return Copies(np.array([*sources.values()], np.int32), np.array([*sources], np.int32))
