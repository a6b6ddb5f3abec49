"""Requests that wait, in the tokenizer actor, for what vision workers read of their images and
videos."""

from __future__ import annotations

from collections.abc import Iterator

from nanoactor.media.prompt import VisualItem
from nanoactor.messages.engine import Submit
from nanoactor.messages.vision import ItemsRead
from nanoactor.text.prompt_encoder import Encoded
from nanoactor.vision.gather import ItemCollector
from nanoactor.vision.media import ReadItem, Unusable


class HeldRequests:
    """Encoded requests that wait for the keys (content hashes) and sizes of their items (images
    and videos), and the items that have arrived. Used by the tokenizer actor."""

    def __init__(self) -> None:
        self._items = ItemCollector()
        self._held: dict[int, tuple[Submit, Encoded | Exception]] = {}
        """Encoded requests that wait for items, by uid."""
        self._workers: dict[int, int] = {}
        """Index of the vision worker that has each request's items, by uid."""

    def __len__(self) -> int:
        """Return the number of requests that wait, plus the number of those of which items have
        arrived or will be dropped."""
        return len(self._held) + len(self._items)

    def has_items(self, event: Submit) -> bool:
        """Return True if all items of a request have arrived."""
        count = len(event.item_times)
        return not count or self._items.is_complete(event.uid, count)

    def hold(self, event: Submit, result: Encoded | Exception) -> None:
        """Hold a request until its items have arrived. `event` must own its memory."""
        self._held[event.uid] = event, result

    def release(self, event: ItemsRead) -> Iterator[tuple[Submit, Encoded | Exception]]:
        """Add the items that a vision worker has read. Yield each held request that is complete as
        soon as its last item is added."""
        for row, (uid, item) in enumerate(
            zip(event.uids.tolist(), event.items.tolist(), strict=True)
        ):
            error = event.errors[row]
            read = ReadItem(bytes(event.keys[row]), tuple(event.grids[row].tolist()))
            unusable = Unusable(error, bool(event.refused[row])) if error else None
            count = self._items.add(uid, item, unusable or read)
            if count:
                self._workers[uid] = event.worker
            if uid in self._held and count == len(self._held[uid][0].item_times):
                yield self._held.pop(uid)

    def pop(self, uid: int) -> Submit | None:
        """Stop holding a request and return it; None if it is not held."""
        held = self._held.pop(uid, None)
        return None if held is None else held[0]

    def collect(self, event: Submit) -> list[VisualItem]:
        """Return the items of a request, all of which have arrived. Raises the errors of
        `ItemCollector.collect`."""
        kinds = ["video" if times else "image" for times in event.item_times]
        return [
            VisualItem(one.key, one.grid[1], one.grid[2], times or None)
            for one, times in zip(
                self._items.collect(event.uid, kinds), event.item_times, strict=True
            )
        ]

    def worker_of(self, event: Submit) -> int:
        """Return the index of the vision worker that has the request's items; -1 if it has
        none."""
        return self._workers.get(event.uid, -1)

    def forget(self, event: Submit) -> None:
        """Forget the items of a request. Items that arrive later are dropped."""
        if event.item_times:
            self._items.finish(event.uid, len(event.item_times))
            self._workers.pop(event.uid, None)
