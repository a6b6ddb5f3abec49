"""Blocks that were only partly written when a restart cut off their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanoactor.kv.holding import Holding
from nanoactor.kv.pool import BlockPool
from nanoactor.messages.engine import Int32

_PARTIAL_PREFIX = b"begun"
"""Prefix of the names by which partial blocks are indexed."""


class PartialBlock(NamedTuple):
    """A partly written block that a sequence can continue."""

    block: int
    positions: int
    """Number of leading positions in the block whose tokens match the sequence."""


class Leftovers:
    """Finds partly filled blocks by their first tokens, for sequences that continue after a
    restart.

    The pool may evict such a block like any other cached one. An entry is valid as long as the
    pool's index still maps the block's name to the block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._by_parent: dict[bytes, list[tuple[Int32, int, bytes]]] = {}
        """Lists of (tokens whose keys and values a block contains, block, name of the block in the
        index), by the hash of the preceding block."""

    def add(self, holding: Holding, tokens: Int32) -> None:
        """Index the blocks of a sequence that has computed `tokens`: full blocks by their hashes in
        `holding`, and the last blocks also by their tokens."""
        size, hashes, full = self._size, holding.hashes, len(tokens) // self._size
        for block, content in zip(holding.table[:full], hashes[:full], strict=True):
            self._pool.remember(block, content)
        # A sequence may resume a few tokens before its last one, within the last full block.
        for index in range(max(0, full - 1), -(-len(tokens) // size)):
            if index not in holding.extras:
                parent = hashes[index - 1] if index else b""
                self._add_block(holding.table[index], parent, tokens[index * size :][:size])

    def _add_block(self, block: int, parent: bytes, tokens: Int32) -> None:
        self._pool.remember(block, _PARTIAL_PREFIX + parent + tokens.tobytes())  # unless it has one
        if (name := self._pool.content_of(block)) is not None:
            self._by_parent.setdefault(parent, []).append((tokens.copy(), block, name))

    def claim(self, hashes: Sequence[bytes], tokens: Int32) -> PartialBlock | None:
        """Find the block after the prefix with these hashes whose content matches the most of
        `tokens`. Remove the block from the index, add a reference to it, and return it. Return None
        if no unreferenced block matches any token."""
        best, longest = None, 0
        for stored, block, name in self._by_parent.get(hashes[-1] if hashes else b"", ()):
            if self._pool.find(name) != block or self._pool.is_held(block):
                continue
            count = min(len(stored), len(tokens))
            same = stored[:count] == tokens[:count]
            count = count if same.all() else int(np.argmin(same))
            if count > longest:
                best, longest = block, count
        if best is None:
            return None
        self._pool.share(best)
        self._pool.forget(best)  # its holder writes on in it
        return PartialBlock(best, longest)
