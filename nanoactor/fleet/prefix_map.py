"""An ingress's view of the prefixes that each replica has cached: slightly delayed, and bounded in
size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from nanoactor.fleet.wire import IndexNews
from nanoactor.kv.hashing import HASH_BYTES

MOST_BLOCKS = 1 << 18
"""Maximum number of known blocks per replica, about 25 MB. The oldest blocks are dropped first."""
LATELY = 60.0
"""Seconds for which a block counts as in use after a prompt has last contained it."""
_KEY_BYTES = 8


class PrefixMap:
    """Hashes of the full blocks in the prefix index of each replica. If the map is wrong, a request
    is sent to a replica that has to compute more; outputs are never affected."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        # A plain dict takes ever longer to find its oldest key after many removals.
        self._known: dict[str, OrderedDict[int, None]] = {}
        self._used: dict[str, OrderedDict[int, float]] = {}
        """By replica: times at which its blocks were last in a prompt or new, the oldest first.
        Evicted blocks are included, because prompts needed them."""

    def take(self, replica: str, news: IndexNews, now: float) -> None:
        """Apply the index changes that a replica reports."""
        known = self._known.setdefault(replica, OrderedDict())
        if news.cleared:
            known.clear()
        for key in _keys(news.forgotten):
            known.pop(key, None)
        self._add(replica, _keys(news.remembered), now)

    def expect(self, replica: str, hashes: bytes, now: float) -> None:
        """Record that a replica will soon have the blocks with these hashes, as it was sent a
        prompt with them."""
        self._add(replica, _keys(hashes), now)

    def _add(self, replica: str, keys: Sequence[int], now: float) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        used = self._used.setdefault(replica, OrderedDict())
        for key in keys:
            known[key], used[key] = None, now
            used.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)
        while len(used) > self._most:
            used.popitem(last=False)

    def in_use(self, replica: str, now: float) -> int:
        """Return the number of a replica's recently used blocks, which its cache should hold."""
        used = self._used.get(replica, OrderedDict())
        while used and next(iter(used.values())) < now - LATELY:
            used.popitem(last=False)
        return len(used)

    def forget(self, replica: str) -> None:
        """Remove a replica."""
        self._known.pop(replica, None)
        self._used.pop(replica, None)

    def blocks(self, replica: str) -> int:
        """Return the number of known blocks of a replica."""
        return len(self._known.get(replica, ()))

    def longest(self, replica: str, hashes: Sequence[int]) -> int:
        """Return the length, in blocks, of the longest prompt prefix that a replica has cached. A
        child block is evicted before its parent, so a binary search finds the last cached block."""
        known = self._known.get(replica)
        if not known or not hashes or hashes[0] not in known:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in known else (low, middle - 1)
        return low


def keys_of(hashes: bytes) -> list[int]:
    """Return the keys of hashes of 16 bytes each, in the form that `PrefixMap.longest` expects."""
    return list(_keys(hashes))


def _keys(hashes: bytes) -> list[int]:
    return [
        int.from_bytes(hashes[at : at + _KEY_BYTES], "little")
        for at in range(0, len(hashes), HASH_BYTES)
    ]
