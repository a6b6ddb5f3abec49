"""Changes of the prefix index that have not been published yet, and copies of the index built from
published changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nanoactor.kv.hashing import HASH_BYTES
from nanoactor.kv.index_events import IndexEvents

_NO_LIMIT = 1 << 62


class IndexChanges:
    """Collects changes to the prefix index until they are published. Changes that cancel out are
    dropped, so there are never more changes than blocks that are indexed now or were indexed at the
    last publication."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        """For each changed hash of a full block: True if it was added to the index, False if it was
        removed."""
        self._cleared = False

    def __len__(self) -> int:
        """Return the number of unpublished changes."""
        return len(self._changes) + self._cleared

    def remember(self, content: bytes) -> None:
        """Record that the block with this hash was added to the index."""
        self._note(content, is_present=True)

    def forget(self, content: bytes) -> None:
        """Record that the block with this hash was removed from the index."""
        self._note(content, is_present=False)

    def _note(self, content: bytes, is_present: bool) -> None:
        if len(content) != HASH_BYTES:  # the name of a partial block, local to this engine
            return
        # If an unpublished change is undone, neither change needs to be published.
        if self._changes.pop(content, is_present) == is_present:
            self._changes[content] = is_present

    def republish(self, contents: Iterable[bytes]) -> None:
        """Replace all changes: readers will be told to clear their copies of the index, and then to
        add all of `contents`."""
        self._cleared, self._changes = True, {}
        for content in contents:
            self.remember(content)

    def drain(self, limit: int = _NO_LIMIT) -> IndexEvents | None:
        """Return at most `limit` changes and mark them as published; None if there are none."""
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
    """The hashes of all full blocks in an engine's prefix index, rebuilt from its published
    changes."""

    def __init__(self) -> None:
        self.contents: set[bytes] = set()

    def apply(self, events: IndexEvents) -> None:
        """Apply a message of changes; messages must be applied in order."""
        if events.cleared:
            self.contents.clear()
        self.contents.difference_update(map(bytes, events.forgotten))
        self.contents.update(map(bytes, events.remembered))


def _rows(contents: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(contents), np.uint8).reshape(-1, HASH_BYTES)
