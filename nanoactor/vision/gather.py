"""Collects, for a tokenizer, the vision workers' findings about a request's items."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.vision.media import ReadItem, Unusable


class ItemGathering:
    """Items by request. They come in any order, and may overtake the request itself."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, ReadItem | Unusable]] = {}
        self._swallow: dict[int, int] = {}
        """By finished request: how many of its items are still to come."""

    def __len__(self) -> int:
        """Return the number of known requests."""
        return len(self._found) + len(self._swallow)

    def add(self, uid: int, item: int, found: ReadItem | Unusable) -> int:
        """Take an item, or why it cannot be used; return how many of its request have arrived."""
        if uid in self._swallow:
            self._swallow[uid] -= 1
            if not self._swallow[uid]:
                del self._swallow[uid]
            return 0
        items = self._found.setdefault(uid, {})
        items[item] = found
        return len(items)

    def has(self, uid: int, count: int) -> bool:
        """Return True if all of a request's items have arrived."""
        return len(self._found.get(uid, ())) == count

    def of(self, uid: int, kinds: Sequence[str]) -> list[ReadItem]:
        """Return a request's items, in their order; `kinds` gives the kind of each. Raises
        `InvalidRequest` if one cannot be used, `OutOfResources` if the machine is to blame."""
        items = self._found.get(uid, {})
        for index, found in sorted(items.items()):
            if isinstance(found, Unusable):
                same = [number for number, kind in enumerate(kinds) if kind == kinds[index]]
                name = f"{kinds[index]} {same.index(index) + 1} of {len(same)}"
                kind = OutOfResources if found.is_refused else InvalidRequest
                raise kind(f"{name}: {found.reason}")
        return [found for _, found in sorted(items.items()) if isinstance(found, ReadItem)]

    def forget(self, uid: int, count: int) -> None:
        """Finish a request of `count` items: those still to come are dropped."""
        missing = count - len(self._found.pop(uid, ()))
        if missing:
            self._swallow[uid] = missing
