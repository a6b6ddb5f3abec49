"""Unpublished changes of the prefix index, as a difference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nanoactor.kv.hashing import HASH_BYTES
from nanoactor.kv.index_events import IndexEvents

_NO_LIMIT = 1 << 62


class IndexChanges:
    """Merges changes until they are published, so that their number is bounded by the number of
    blocks that the index holds, plus the number that it held at the last publication."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        """By hash of a full block: True if it was added to the index, False if it was removed."""
        self._cleared = False

    def __len__(self) -> int:
        """Return the number of unpublished changes."""
        return len(self._changes) + self._cleared

    def remember(self, content: bytes) -> None:
        """Record that a block was added to the index."""
        self._note(content, is_present=True)

    def forget(self, content: bytes) -> None:
        """Record that a block was removed from the index."""
        self._note(content, is_present=False)

    def _note(self, content: bytes, is_present: bool) -> None:
        if len(content) != HASH_BYTES:  # the name of a partial block, local to this engine
            return
        # An unpublished change that is undone need not be published at all.
        if self._changes.pop(content, is_present) == is_present:
            self._changes[content] = is_present

    def republish(self, contents: Iterable[bytes]) -> None:
        """Tell readers to clear their copies, and publish the whole index."""
        self._cleared, self._changes = True, {}
        for content in contents:
            self.remember(content)

    def drain(self, limit: int = _NO_LIMIT) -> IndexEvents | None:
        """Return at most `limit` changes, which then count as published; None if there are none."""
        if not self:
            return None
        batch = list(itertools.islice(self._changes.items(), limit))
        for content, _ in batch:
            del self._changes[content]
        cleared, self._cleared = self._cleared, False
        return IndexEvents(
            cleared,
            forgotten=_rows(content for content, is_present in batch if not is_present),
            remembered=_rows(content for content, is_present in batch if is_present),
        )


class IndexCopy:
    """Hashes of the full blocks in an engine's prefix index, rebuilt from its published changes."""

    def __init__(self) -> None:
        self.contents: set[bytes] = set()

    def apply(self, events: IndexEvents) -> None:
        """Apply changes that a block manager has published."""
        if events.cleared:
            self.contents.clear()
        self.contents.difference_update(map(bytes, events.forgotten))
        self.contents.update(map(bytes, events.remembered))


def _rows(contents: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(contents), np.uint8).reshape(-1, HASH_BYTES)
