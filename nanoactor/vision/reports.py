"""Reports of a vision worker to other actors, which are merged until they can be sent."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from nanoactor.messages.vision import ItemsFailed, ItemsRead, NoPixels, ResendMedia
from nanoactor.vision.media import ReadItem, Unusable

T = TypeVar("T")

_MAX_PER_MESSAGE = 256


class VisionReports:
    """Reports that a vision worker actor has yet to send. Each method named `pop_...` returns a
    message with as many entries as fit into it, oldest first. It may be called only if there is an
    entry."""

    def __init__(self) -> None:
        self.read: dict[int, list[tuple[int, int, ReadItem | Unusable]]] = {}
        """(uid, index of the item, result) of each item to report, by index of the tokenizer. The
        result is the item's key and grid, or why it cannot be used."""
        self.resends: list[tuple[int, int]] = []
        """(uid, index) of each item whose bytes the frontend must send again."""
        self.failed: list[tuple[int, Unusable]] = []
        """Number of the pixels that cannot be decoded, and why; for the scheduler."""
        self.absent: list[int] = []
        """Numbers of pixels that will not be sent; for the runners."""

    @property
    def num_read(self) -> int:
        """Number of items in `read`."""
        return sum(map(len, self.read.values()))

    def add_read(
        self, tokenizer: int, item_id: tuple[int, int], found: ReadItem | Unusable
    ) -> None:
        """Add an item, (uid, index of the item), to report to the tokenizer with this index."""
        self.read.setdefault(tokenizer, []).append((*item_id, found))

    def pop_read(self, tokenizer: int, worker: int) -> ItemsRead:
        """Return a message to a tokenizer about items that were read. `worker` is the index of the
        reporting vision worker."""
        uids, items, results = zip(*_pop_batch(self.read[tokenizer]), strict=True)
        nothing = ReadItem(bytes(16), (0, 0, 0))
        read = [nothing if isinstance(one, Unusable) else one for one in results]
        refused = [isinstance(one, Unusable) and one.is_machine_fault for one in results]
        return ItemsRead(
            worker,
            np.array(uids, np.int64),
            np.array(items, np.int32),
            keys=np.frombuffer(b"".join(one.key for one in read), np.uint8).reshape(-1, 16),
            grids=np.array([one.grid for one in read], np.int32),
            errors=[one.reason if isinstance(one, Unusable) else "" for one in results],
            refused=np.array(refused, np.uint8),
        )

    def pop_resends(self) -> ResendMedia:
        """Return a message to the frontend about items whose bytes it must send again."""
        uids, items = zip(*_pop_batch(self.resends), strict=True)
        return ResendMedia(np.array(uids, np.int64), np.array(items, np.int32))

    def pop_failed(self) -> ItemsFailed:
        """Return a message to the scheduler about pixels that cannot be decoded."""
        failed = _pop_batch(self.failed)
        numbers = [number for number, _ in failed]
        refused = [number for number, why in failed if why.is_machine_fault]
        columns = np.array(numbers, np.int64), [why.reason for _, why in failed]
        return ItemsFailed(*columns, np.array(refused, np.int64))

    def pop_absent(self) -> NoPixels:
        """Return a message to the runners about pixels that will not be sent."""
        return NoPixels(np.array(_pop_batch(self.absent), np.int64))


def _pop_batch(entries: list[T]) -> list[T]:
    """Remove and return as many entries as fit into one message, oldest first."""
    batch = entries[:_MAX_PER_MESSAGE]
    del entries[:_MAX_PER_MESSAGE]
    return batch
