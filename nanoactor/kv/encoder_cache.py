"""Cache of the vision tower's outputs. It manages pages, references and the eviction of items, but
not the data itself, which is on the device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import ProtocolBug
from nanoactor.media.units import EncodeUnits


@dataclasses.dataclass(eq=False, slots=True)
class EncodedItem:
    """The cache entry of one image or video. Its rows are the encoder's outputs, including those
    of all deepstack levels."""

    key: bytes
    """Hash (16 bytes) of the item's content, size and preprocessing."""
    units: EncodeUnits
    pages: list[int]
    number: int
    """Unique number of the entry, never reused."""
    references: int = 0
    planned: int = 0
    """Number of units (parts of the item's encoding, done in order) that planned steps compute.
    Kept when the item is released, so that encoding continues from there for the next user."""
    ticket: int = 0
    """Number of the latest release after which no sequence held the item. Quarantine entries of
    earlier releases are void."""
    trusted: bool = True


class EncoderCache:
    """Pages, references and eviction order of encoded items.

    An item is *held* (referenced), *quarantined* (unreferenced, but a step in flight may still use
    it) or *idle*. Idle items are evicted, least recently used first. The scheduler counts the
    available pages before it admits a sequence, so `acquire` always finds room.
    """

    def __init__(self, pages: int, page_rows: int) -> None:
        self._page_rows = page_rows
        self._free: deque[int] = deque(range(pages))
        self._items: dict[bytes, EncodedItem] = {}
        self._by_number: dict[int, EncodedItem] = {}
        """All items with pages, by number, including those removed from the index."""
        self._idle: OrderedDict[bytes, EncodedItem] = OrderedDict()
        self._quarantine: deque[tuple[int, int, EncodedItem]] = deque()
        """(fence, release number, item). The fence is the step that must be done before the item
        may be overwritten."""
        self._last_ticket = self._completed = self._last_number = 0
        self.evictions = self.hits = 0

    def pages_of(self, rows: int) -> int:
        """Return the number of pages needed for `rows` rows."""
        return -(-rows // self._page_rows)

    def acquire(self, key: bytes, units: EncodeUnits) -> tuple[EncodedItem, int]:
        """Add a reference to an item; its pages are allocated if it is not cached. Return the item,
        and the number of its pages that other sequences already hold.

        Raises `ProtocolBug` if there is no room, because the scheduler should not have admitted the
        sequence then.
        """
        item = self._items.get(key)
        if item is None:
            self._last_number += 1
            pages = self._allocate(self.pages_of(units.total_rows))
            item = EncodedItem(key, units, pages, self._last_number)
            self._items[key] = self._by_number[item.number] = item
        elif item.units != units:
            raise ProtocolBug(f"item {key.hex()} has {item.units}, but a hold requests {units}")
        else:
            self.hits += 1
        self._idle.pop(key, None)
        item.references += 1
        return item, len(item.pages) if item.references > 1 else 0

    def find(self, number: int) -> EncodedItem | None:
        """Return the item with this number; None if its pages were freed."""
        return self._by_number.get(number)

    def get(self, number: int) -> EncodedItem:
        """Return the item with this number. Raises `ProtocolBug` if it has no pages."""
        item = self._by_number.get(number)
        if item is None:
            raise ProtocolBug(f"item number {number} has no pages")
        return item

    def locate(self, item: EncodedItem, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the cache rows, int32 (rows,), in which these rows of an item are stored."""
        pages = np.array(item.pages, np.int32)
        size = np.int32(self._page_rows)
        rows_in_cache: NDArray[np.int32] = pages[rows // size] * size + rows % size
        return rows_in_cache

    def _allocate(self, pages: int) -> list[int]:
        while len(self._free) < pages and self._idle:
            _, item = self._idle.popitem(last=False)
            self.evictions += 1
            self._free_item(item)
        if len(self._free) < pages:
            raise ProtocolBug("no page is free or idle: more credits were spent than exist")
        return [self._free.popleft() for _ in range(pages)]

    def _free_item(self, item: EncodedItem) -> None:
        if self._items.get(item.key) is item:
            del self._items[item.key]
        del self._by_number[item.number]
        self._free.extend(item.pages)

    def release(self, item: EncodedItem, fence: int) -> int:
        """Drop a reference to an item. Return the number of pages that become unreferenced; they
        are available again once step `fence` is complete. Raises `ProtocolBug` if the item is not
        held."""
        if item.references <= 0:
            raise ProtocolBug(f"item {item.key.hex()} is released but not held")
        item.references -= 1
        if item.references:
            return 0
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._quarantine.append((fence, item.ticket, item))
        self.complete(self._completed)
        return len(item.pages)

    def complete(self, step: int) -> None:
        """Record that all steps up to `step` are done. Unreferenced items that waited for these
        steps may now be evicted."""
        self._completed = max(self._completed, step)
        while self._quarantine and self._quarantine[0][0] <= self._completed:
            _, ticket, item = self._quarantine.popleft()
            # Skip items that are referenced again, or that were released once more after this
            # entry.
            if item.references or item.ticket != ticket:
                continue
            if item.trusted:
                self._idle[item.key] = item
            else:
                self._free_item(item)

    def distrust(self, item: EncodedItem) -> None:
        """Remove an item from the index because a row that read it has failed. Sequences that need
        it encode it again."""
        item.trusted = False
        if self._items.get(item.key) is item:
            del self._items[item.key]
        if self._idle.get(item.key) is item:
            del self._idle[item.key]
            self._free_item(item)

    def check(self, pages: int, holders: Mapping[EncodedItem, int]) -> None:
        """Raise `ProtocolBug` unless the reference counts equal `holders` (number of users by item)
        and each of the `pages` pages is in exactly one place."""
        quarantined = {
            id(item): item
            for _, ticket, item in self._quarantine
            if not item.references and item.ticket == ticket
        }
        for item, count in holders.items():
            if item.references != count:
                raise ProtocolBug(
                    f"item {item.key.hex()} has {item.references} references, but {count} users"
                )
        items = [*holders, *quarantined.values(), *self._idle.values()]
        used = [page for item in items for page in item.pages]
        if sorted([*self._free, *used]) != [*range(pages)]:
            raise ProtocolBug(
                f"some pages are in two places or in none: {len(used)} used of {pages}"
            )
        lost = [i for i in self._items.values() if i not in items]
        if lost:
            raise ProtocolBug(
                f"item {lost[0].key.hex()} is in the index, but it is neither in use, quarantined "
                "nor idle"
            )
