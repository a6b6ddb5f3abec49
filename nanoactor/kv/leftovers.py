"""Blocks whose sequences were cut off while they were being written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanoactor.kv.holding import Holding
from nanoactor.kv.pool import BlockPool
from nanoactor.messages import Int32

_BEGUN = b"begun"
"""Begins the index's names of blocks that are not full."""


class Begun(NamedTuple):
    """A block that somebody goes on with."""

    block: int
    positions: int
    """The number of its positions that hold what they ask for."""


class Leftovers:
    """Finds a block by the tokens at its beginning, for whoever goes on behind the same prefix.

    The pool may evict such a block as any other that is cached; it is there as long as its name is.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._behind: dict[bytes, list[tuple[Int32, int, bytes]]] = {}
        """By the hash of the block before: (tokens of which a block has keys and values, the block,
        its name in the index)."""

    def leave(self, holding: Holding, tokens: Int32) -> None:
        """Index the blocks of a sequence that has computed these tokens; full ones by their hashes,
        which it has."""
        size, hashes, full = self._size, holding.hashes, len(tokens) // self._size
        for block, content in zip(holding.table[:full], hashes[:full], strict=True):
            self._pool.remember(block, content)
        # Whoever goes on may be some tokens behind: before the end of a block that is full.
        for index in range(max(0, full - 1), -(-len(tokens) // size)):
            if index not in holding.extras:
                parent = hashes[index - 1] if index else b""
                self._leave_block(holding.table[index], parent, tokens[index * size :][:size])

    def _leave_block(self, block: int, parent: bytes, tokens: Int32) -> None:
        self._pool.remember(block, _BEGUN + parent + tokens.tobytes())  # unless it has a name
        if (name := self._pool.content_of(block)) is not None:
            self._behind.setdefault(parent, []).append((tokens.copy(), block, name))

    def take(self, hashes: Sequence[bytes], tokens: Int32) -> Begun | None:
        """Take over, with one reference, the block behind those of these hashes that has most of
        these tokens at its beginning. None where no block has any, or only blocks that others
        hold."""
        best, most = None, 0
        for left, block, name in self._behind.get(hashes[-1] if hashes else b"", ()):
            if self._pool.find(name) != block or self._pool.is_held(block):
                continue
            count = min(len(left), len(tokens))
            same = left[:count] == tokens[:count]
            count = count if same.all() else int(np.argmin(same))
            if count > most:
                best, most = block, count
        if best is None:
            return None
        self._pool.share(best)
        self._pool.forget(best)  # its holder writes on in it
        return Begun(best, most)
