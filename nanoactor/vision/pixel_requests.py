"""Requests for the pixels of images and videos, and the pixels on their way to the runners."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.vision import Pixels, WantPixels
from nanoactor.vision.media import PIECE_BYTES


class PixelRequests:
    """The scheduler's requests for pixels that have not been answered completely, and the items
    (images and videos) whose bytes they wait for. Used by the vision worker actor."""

    def __init__(self) -> None:
        self._requests: dict[int, WantPixels] = {}
        """Each request, by the number of its pixels."""
        self._waiting: dict[tuple[int, int], list[int]] = {}
        """Numbers of the requests that wait for an item's bytes, by (uid, index of the item)."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        """Return True if the pixels with this number are still requested. May be called from any
        thread."""
        return number in self._requests

    @property
    def num_awaited(self) -> int:
        """Number of items whose bytes are missing."""
        return len(self._waiting)

    def add(self, event: WantPixels) -> None:
        """Add a request."""
        self._requests[event.pixels] = event

    def wait(self, event: WantPixels) -> bool:
        """Let a request wait for the bytes of its item. Return True if no other request waits for
        them."""
        waiting = self._waiting.setdefault((event.uid, event.item), [])
        waiting.append(event.pixels)
        return len(waiting) == 1

    def pop_waiting(self, item_id: tuple[int, int]) -> Sequence[int]:
        """Return the numbers of the requests that waited for the bytes of an item, which have
        arrived. `item_id` is (uid, index of the item)."""
        return self._waiting.pop(item_id, ())

    def remove(self, number: int) -> None:
        """Remove a request that does not wait for bytes."""
        del self._requests[number]

    def cancel(self, number: int) -> None:
        """Remove a request. If it was the last to wait for an item's bytes, nothing waits for them
        anymore."""
        want = self._requests.pop(number)
        item_id = want.uid, want.item
        waiting = self._waiting.get(item_id, [])
        if number in waiting:
            waiting.remove(number)
            if not waiting:  # bytes that still arrive only go to the store
                del self._waiting[item_id]


class PixelQueue:
    """Decoded pixels that are sent to the runners in pieces, one item (an image or video) after
    the other. Used by the vision worker actor."""

    def __init__(self) -> None:
        self._sending: deque[tuple[int, NDArray[np.uint8]]] = deque()
        self._sent = 0
        """Number of bytes of the first entry in `_sending` that were already sent."""

    def __len__(self) -> int:
        """Return the number of items that have not been sent completely."""
        return len(self._sending)

    def add(self, number: int, pixels: NDArray[np.uint8]) -> None:
        """Queue the pixels of an item."""
        self._sending.append((number, pixels))

    def cancel(self, number: int) -> None:
        """Drop the pixels with this number, if they are queued."""
        if self._sending and self._sending[0][0] == number:
            self._sent = 0
        self._sending = deque(entry for entry in self._sending if entry[0] != number)

    def pop_piece(self) -> tuple[Pixels, bool]:
        """Return the message with the next piece, and True if it is the last piece of its item.
        May be called only if the queue is not empty."""
        number, array = self._sending[0]
        data = array.reshape(-1)[self._sent : self._sent + PIECE_BYTES]
        piece = Pixels(number, array.shape, self._sent, data)
        self._sent += len(data)
        is_last = self._sent == array.size
        if is_last:
            self._sending.popleft()
            self._sent = 0
        return piece, is_last
