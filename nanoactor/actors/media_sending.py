"""Transfer of pictures from the journal to the vision workers, in pieces."""

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
    """Sends the bytes of pictures as the workers' edges have room for them."""

    def __init__(self, workers: Sequence[Outbox]) -> None:
        """`workers` are the outboxes of the edges to the vision workers."""
        self._workers = workers
        self._sending: dict[int, deque[MediaPiece]] = {}
        """By worker: the next piece of each item in transit, without its data."""
        self._data: dict[tuple[int, int], memoryview] = {}
        """By (uid, item): all bytes of each item in transit."""

    def __len__(self) -> int:
        """Return the number of items in transit."""
        return len(self._data)

    def is_sending(self, uid: int, item: int) -> bool:
        """Return True if an item of a request is in transit."""
        return (uid, item) in self._data

    def send(self, entry: Entry, uid: int, item: int, tokenizer: int) -> None:
        """Send a picture to a worker, the same one for all sequences of the request. The worker
        reports the picture's key and grid to `tokenizer`, or to none if that is -1."""
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
        """Handle an edge that has room again."""
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
        """Cancel all transfers, and drop their data."""
        self._sending.clear()
        self._data.clear()
