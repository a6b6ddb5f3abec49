"""Unpublished changes of the prefix index, as a difference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nanoactor.kv.hashing import HASH_BYTES
from nanoactor.kv.index_events import IndexEvents

_ALL = 1 << 62


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
        self._note(content, is_there=True)

    def forget(self, content: bytes) -> None:
        """Record that a block was removed from the index."""
        self._note(content, is_there=False)

    def _note(self, content: bytes, is_there: bool) -> None:
        if len(content) != HASH_BYTES:  # the name of a partial block, local to this engine
            return
        # An unpublished change that is undone need not be published at all.
        if self._changes.pop(content, is_there) == is_there:
            self._changes[content] = is_there

    def begin_anew(self, contents: Iterable[bytes]) -> None:
        """Have readers clear their copies, and publish the whole index."""
        self._cleared, self._changes = True, {}
        for content in contents:
            self.remember(content)

    def take(self, most: int = _ALL) -> IndexEvents | None:
        """Return at most `most` changes, which then count as published; None if there are none."""
        if not self:
            return None
        first = list(itertools.islice(self._changes.items(), most))
        for content, _ in first:
            del self._changes[content]
        cleared, self._cleared = self._cleared, False
        return IndexEvents(
            cleared,
            forgotten=_rows(content for content, is_there in first if not is_there),
            remembered=_rows(content for content, is_there in first if is_there),
        )


class IndexCopy:
    """Hashes of the full blocks in an engine's prefix index, rebuilt from its published changes."""

    def __init__(self) -> None:
        self.contents: set[bytes] = set()

    def take(self, events: IndexEvents) -> None:
        """Apply published changes."""
        if events.cleared:
            self.contents.clear()
        self.contents.difference_update(map(bytes, events.forgotten))
        self.contents.update(map(bytes, events.remembered))


def _rows(contents: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(contents), np.uint8).reshape(-1, HASH_BYTES)
