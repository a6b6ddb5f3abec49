"""Transfer of images and videos from the frontend to the vision workers, in pieces."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoactor.messages.vision import MediaPiece
from nanoactor.recovery.journal import Entry
from nanoactor.runtime.outbox import Outbox
from nanoactor.vision.media import PIECE_BYTES


class MediaSender:
    """Sender of images and videos to vision workers. It sends pieces as long as the outboxes have
    room, and the rest later."""

    def __init__(self, workers: Sequence[Outbox]) -> None:
        """`workers` are the outboxes to the vision workers, by worker index."""
        self._workers = workers
        self._sending: dict[int, deque[MediaPiece]] = {}
        """The next piece of each item in transit, without its data, by worker index."""
        self._data: dict[tuple[int, int], memoryview] = {}
        """All bytes of each item in transit, by (uid, index of the item)."""

    def __len__(self) -> int:
        """Return the number of images and videos that are still being sent."""
        return len(self._data)

    def is_sending(self, uid: int, item: int) -> bool:
        """Return True if this item of a request (an image or video) is still being sent."""
        return (uid, item) in self._data

    def send(self, entry: Entry, uid: int, item: int, tokenizer: int) -> None:
        """Queue an item of a request for its vision worker, which is the same for all sequences of
        the request. The worker reports the item's key (content hash) and grid (size in tokens) to
        the tokenizer with index `tokenizer`; -1 means to none."""
        media = entry.media[item]
        worker = entry.submit.uid % len(self._workers)
        data = memoryview(media.data).cast("B")
        piece = MediaPiece(
            uid,
            item,
            tokenizer,
            form=media.form,
            shape=media.shape,
            area=media.area,
            frames=media.frames,
            size=len(data),
            offset=0,
            data=np.empty(0, np.uint8),
        )
        self._data[uid, item] = data
        self._sending.setdefault(worker, deque()).append(piece)
        self._send_pieces(worker)

    def on_ready(self, outbox: Any) -> None:
        """Continue sending through an outbox that has room again."""
        for worker, own in enumerate(self._workers):
            if own is outbox:
                self._send_pieces(worker)

    def _send_pieces(self, worker: int) -> None:
        pieces, outbox = self._sending.get(worker, deque()), self._workers[worker]
        while pieces and outbox.ready:
            piece = pieces.popleft()
            item_id, end = (piece.uid, piece.item), piece.offset + PIECE_BYTES
            data = np.frombuffer(self._data[item_id][piece.offset : end], np.uint8)
            outbox.send(dataclasses.replace(piece, data=data))
            if end < piece.size:
                pieces.appendleft(dataclasses.replace(piece, offset=end))
            else:
                del self._data[item_id]

    def forget(self) -> None:
        """Cancel all transfers and drop their data."""
        self._sending.clear()
        self._data.clear()
