"""Requests for the pixels of images and videos, which vision workers decode and send to every
rank."""

from __future__ import annotations

import numpy as np

from nanoactor.messages.vision import CancelPixels, DropPixels, WantPixels
from nanoactor.scheduling.edges import VISION, Outgoing
from nanoactor.scheduling.resources.rank_resources import RankResources
from nanoactor.scheduling.sequences.item_state import EncoderEntry


class PixelRequests:
    """The open requests for pixels. `Images` requests the pixels of an encoder-cache entry before
    the entry is encoded, and drops them when no sequence needs the entry any more."""

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of ranks that must receive the pixels of a request."""
        self.out: list[tuple[int, WantPixels | CancelPixels]] = []
        """(worker index, message) pairs that have not been sent yet."""
        self.drops: list[tuple[int, int]] = []
        """(pixel request number, cache entry number) pairs of the pixels that the runners may drop,
        not sent yet."""
        self._entries: dict[int, EncoderEntry] = {}
        """The entry that each open request is for, by request number."""
        self._pixels = RankResources("pixels", ranks)
        self._num_requests = 0

    @property
    def numbers(self) -> list[int]:
        """Numbers of the open requests."""
        return [*self._entries]

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._entries)

    def is_ready(self, entry: EncoderEntry) -> bool:
        """Return True if every rank holds the pixels of an entry."""
        return entry.pixels > 0 and self._pixels.is_ready(entry.pixels)

    def note_ready(self, rank: int, number: int) -> None:
        """Record that a rank holds the pixels of request `number`. Ignored if the request is no
        longer open."""
        self._pixels.note_ready(rank, number)

    def request(self, entry: EncoderEntry) -> None:
        """Request the pixels of an entry from the worker that serves the first of its users."""
        self._num_requests += 1
        entry.pixels = self._num_requests
        self._pixels.request(entry.pixels)
        entry.source, (sequence, item) = next(iter(entry.users.items()))
        assert sequence.items is not None
        entry.worker = sequence.items.message.worker  # the worker has the bytes, or gets them again
        self._entries[entry.pixels] = entry
        self.out.append((entry.worker, WantPixels(entry.pixels, entry.source, item, entry.key)))

    def drop(self, entry: EncoderEntry) -> None:
        """Cancel the request for an entry's pixels if one is open, and have the runners drop the
        pixels. The part of the entry that is not completely encoded has to be encoded again."""
        if entry.pixels:
            self.out.append((entry.worker, CancelPixels(np.array([entry.pixels], np.int64))))
            self.drops.append((entry.pixels, entry.number))
            self.close(entry)
            entry.restart()

    def fail(self, number: int) -> EncoderEntry | None:
        """Close request `number`, whose pixels cannot be decoded. Return its entry; None if the
        request is no longer open."""
        if (entry := self._entries.get(number)) is None:
            return None
        self.drops.append((number, entry.number))
        self.close(entry)
        return entry

    def close(self, entry: EncoderEntry) -> None:
        """Close the request for an entry's pixels without a message to the worker or runners."""
        self._pixels.drop(entry.pixels)
        del self._entries[entry.pixels]
        entry.pixels, entry.source = 0, -1

    def take_out(self) -> list[Outgoing]:
        """Return the messages to the vision workers since the last call."""
        out: list[Outgoing] = [(VISION.format(worker), message) for worker, message in self.out]
        self.out = []
        return out

    def take_drops(self) -> DropPixels | None:
        """Return the pixels that the runners may drop since the last call; None if there are
        none."""
        drops, self.drops = self.drops, []
        if not drops:
            return None
        pixels, numbers = zip(*drops, strict=True)
        return DropPixels(np.array(pixels, np.int64), np.array(numbers, np.int64))

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if the ranks are still to receive any pixels."""
        self._pixels.check_idle()
