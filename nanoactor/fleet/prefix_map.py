"""Prompt prefixes that each replica has cached, according to its reports.

The map lags slightly behind the caches, and its size is limited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from nanoactor.fleet.wire import IndexUpdate
from nanoactor.kv.hashing import HASH_BYTES

MAX_BLOCKS = 1 << 18
"""Maximum number of known blocks per replica, which need about 25 MB. The oldest ones are dropped
first."""
IN_USE_SECONDS = 60.0
"""Time for which a block counts as in use after the last prompt that contained it, in seconds."""
_KEY_BYTES = 8


class PrefixMap:
    """Hashes of the full KV blocks in each replica's prefix cache, for selecting a replica. An
    error in this map never affects outputs: at worst, a replica has to compute more tokens."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # A plain dict finds its oldest key ever more slowly after many removals.
        self._known: dict[str, OrderedDict[int, None]] = {}
        self._last_used: dict[str, OrderedDict[int, float]] = {}
        """For each replica: the time at which each block was added or last occurred in a prompt,
        oldest first. Blocks that the replica has evicted since are included, because prompts needed
        them."""

    def apply(self, replica: str, update: IndexUpdate, now: float) -> None:
        """Apply the index changes that a replica reported at the time `now`, in seconds."""
        blocks = self._known.setdefault(replica, OrderedDict())
        if update.cleared:
            blocks.clear()
        for key in _keys(update.forgotten):
            blocks.pop(key, None)
        self._add(replica, _keys(update.remembered), now)

    def expect(self, replica: str, hashes: bytes, now: float) -> None:
        """Record that a replica will soon have the blocks with these hashes, because a prompt with
        them was sent to it."""
        self._add(replica, _keys(hashes), now)

    def _add(self, replica: str, keys: Sequence[int], now: float) -> None:
        blocks = self._known.setdefault(replica, OrderedDict())
        last_used = self._last_used.setdefault(replica, OrderedDict())
        for key in keys:
            blocks[key], last_used[key] = None, now
            last_used.move_to_end(key)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
        while len(last_used) > self._max_blocks:
            last_used.popitem(last=False)

    def blocks_in_use(self, replica: str, now: float) -> int:
        """Return the number of blocks that a replica has used in the last `IN_USE_SECONDS`, and
        that its cache should therefore keep."""
        last_used = self._last_used.get(replica, OrderedDict())
        while last_used and next(iter(last_used.values())) < now - IN_USE_SECONDS:
            last_used.popitem(last=False)
        return len(last_used)

    def forget(self, replica: str) -> None:
        """Drop everything that is known about a replica."""
        self._known.pop(replica, None)
        self._last_used.pop(replica, None)

    def known_blocks(self, replica: str) -> int:
        """Return the number of blocks that a replica is known to have cached."""
        return len(self._known.get(replica, ()))

    def cached_blocks(self, replica: str, keys: Sequence[int]) -> int:
        """Return the length, in blocks, of the longest prefix of a prompt that a replica has
        cached.

        Cached blocks form a prefix, because a block is evicted before the block that precedes it.
        Therefore, a binary search finds the end.
        """
        blocks = self._known.get(replica)
        if not blocks or not keys or keys[0] not in blocks:
            return 0
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in blocks else (low, middle - 1)
        return low


def block_keys(hashes: bytes) -> list[int]:
    """Convert concatenated hashes of 16 bytes each to the integer keys that `PrefixMap` uses."""
    return list(_keys(hashes))


def _keys(hashes: bytes) -> list[int]:
    return [
        int.from_bytes(hashes[at : at + _KEY_BYTES], "little")
        for at in range(0, len(hashes), HASH_BYTES)
    ]
