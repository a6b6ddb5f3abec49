"""Collection, in the tokenizer actor, of the images and videos that vision workers have read for
each request."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.vision.media import ReadItem, Unusable


class ItemCollector:
    """Collects the items (images and videos) of each request. Items arrive in any order, possibly
    before the request itself."""

    def __init__(self) -> None:
        self._results: dict[int, dict[int, ReadItem | Unusable]] = {}
        self._to_drop: dict[int, int] = {}
        """Number of items that are still to arrive and will be dropped, by the id of the finished
        request."""

    def __len__(self) -> int:
        """Return the number of requests with items that have arrived, plus the number of finished
        requests with items still to arrive."""
        return len(self._results) + len(self._to_drop)

    def add(self, uid: int, item: int, result: ReadItem | Unusable) -> int:
        """Record the result for one item: the item, or the reason why it cannot be used.

        Returns the number of this request's items that have arrived, or 0 if the request is
        finished.
        """
        if uid in self._to_drop:
            self._to_drop[uid] -= 1
            if not self._to_drop[uid]:
                del self._to_drop[uid]
            return 0
        items = self._results.setdefault(uid, {})
        items[item] = result
        return len(items)

    def is_complete(self, uid: int, count: int) -> bool:
        """Return True if all `count` items of a request have arrived."""
        return len(self._results.get(uid, ())) == count

    def collect(self, uid: int, kinds: Sequence[str]) -> list[ReadItem]:
        """Return a request's items in order. `kinds` is the kind of each item, "image" or "video".

        Raises `InvalidRequest` if an item cannot be used, or `OutOfResources` if the machine was
        out of a resource.
        """
        items = self._results.get(uid, {})
        for index, result in sorted(items.items()):
            if isinstance(result, Unusable):
                same = [number for number, kind in enumerate(kinds) if kind == kinds[index]]
                name = f"{kinds[index]} {same.index(index) + 1} of {len(same)}"
                kind = OutOfResources if result.is_machine_fault else InvalidRequest
                raise kind(f"{name}: {result.reason}")
        return [result for _, result in sorted(items.items()) if isinstance(result, ReadItem)]

    def finish(self, uid: int, count: int) -> None:
        """Forget a request of `count` items. Items that arrive later are dropped."""
        missing = count - len(self._results.pop(uid, ()))
        if missing:
            self._to_drop[uid] = missing
