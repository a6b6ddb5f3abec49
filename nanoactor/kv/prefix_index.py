"""Lookup and indexing of prefixes: the blocks in which the first tokens of a sequence are already
computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from nanoactor.kv.hashing import block_hash
from nanoactor.kv.holding import Holding
from nanoactor.kv.leftovers import Leftovers
from nanoactor.kv.tables import BlockTables
from nanoactor.messages.engine import Int32
from nanoactor.messages.rows import Long


class PrefixIndex:
    """Finds the blocks of known prefixes, and indexes the blocks of a sequence as they fill up.

    The block manager looks up each admitted sequence here. The index itself (which block has which
    hash) is part of the pool, because blocks leave it when they are evicted.
    """

    def __init__(self, tables: BlockTables, salt: bytes, is_enabled: bool) -> None:
        """If `is_enabled` is False (no prefix caching), no block is indexed. Prefixes are then only
        found in other sequences of the same request."""
        self._tables, self._pool = tables, tables.pool
        self._block_size = tables.block_size
        self._salt = salt
        self._is_enabled = is_enabled
        self.leftovers = Leftovers(self._pool, self._block_size)
        self.step = 0
        """Number of the last planned step."""
        self._recently_indexed: deque[tuple[int, int]] = deque()
        """Recently indexed blocks as (step, block). `step` was the last planned step when the block
        was indexed; the entry is kept until that step is known to be done."""
        self._to_index: list[tuple[int, int]] = []
        """(slot, number of tokens whose positions are computed) of each slot in which a block has
        filled up since the last call of `update`."""
        self._forget_number = 0
        """Number of the last executed order to clear the index."""

    # -- lookup ---------------------------------------------------------------------------

    def complete_hashes(
        self, hashes: list[bytes], tokens: Int32, extras: Mapping[int, bytes]
    ) -> list[bytes]:
        """Append the hashes of full blocks that are missing from `hashes`, and return `hashes`. An
        admission only contains the hashes of the prompt's blocks. `extras` maps block indices to
        the `extra` argument of `block_hash`."""
        size = self._block_size
        for index in range(len(hashes), len(tokens) // size if self._is_enabled else 0):
            block = tokens[index * size : (index + 1) * size]
            parent, extra = hashes[-1] if hashes else b"", extras.get(index, b"")
            hashes.append(block_hash(parent, block, self._salt, extra))
        return hashes

    def find(self, hashes: list[bytes], request: int) -> list[int]:
        """Return the blocks of the longest known prefix of a sequence whose full blocks have these
        hashes: from the index or, without prefix caching, from another sequence of the same
        request. `request` is the uid of the request's first sequence."""
        if not self._is_enabled:
            return self._lent_blocks(request)[: len(hashes)]
        found: list[int] = []
        for content in hashes:
            if (block := self._pool.find(content)) is None:
                break
            found.append(block)
        return found

    def _lent_blocks(self, request: int) -> list[int]:
        """Return the full prompt blocks of a sequence of the request that has computed them; an
        empty list if there is none."""
        size = self._block_size
        for holding in self._tables.holdings.values():
            if holding.request == request and holding.filled >= holding.shareable * size:
                return [] if holding.distrusted else holding.table[: holding.shareable]
        return []

    # -- indexing -------------------------------------------------------------------------

    def queue_full_blocks(self, slots: Int32, known: Long) -> None:
        """Queue newly filled blocks for `update`. `known` is the number of tokens in each of these
        slots whose positions are computed by planned steps."""
        full = known >= self._tables.next_index[slots]
        if self._is_enabled and full.any():
            self._to_index += zip(slots[full].tolist(), known[full].tolist(), strict=True)

    def update(self) -> None:
        """Index the blocks that known tokens have filled since the last call.

        The hashing may be done after the next step has been sent, but it must be done before the
        next admission and before a slot is released.
        """
        for slot, complete in self._to_index:
            self.index_full_blocks(slot, complete)
        self._to_index.clear()

    def index_full_blocks(self, slot: int, complete: int) -> None:
        """Index the blocks of a slot that end at or before position `complete`, up to which every
        token is known and every position is computed by a planned step.

        Steps run in order, so a sequence that finds such a block reads it only after it is
        computed. Tokens that a step samples past the end of a sequence never become known, so their
        blocks are not indexed.
        """
        if not self._is_enabled:
            return
        tables, size = self._tables, self._block_size
        holding = tables.holdings[slot]
        if holding.distrusted:
            return
        for index in range(int(tables.next_index[slot]) // size - 1, complete // size):
            if index == len(holding.hashes):
                tokens = tables.tokens[slot, : (index + 1) * size]
                self.complete_hashes(holding.hashes, tokens, holding.extras)
            block = holding.table[index]
            if self._pool.remember(block, holding.hashes[index]):
                self._recently_indexed.append((self.step, block))
            tables.next_index[slot] = (index + 2) * size

    def complete(self, step: int) -> None:
        """Record that all steps up to `step` are done."""
        while self._recently_indexed and self._recently_indexed[0][0] <= step:
            self._recently_indexed.popleft()

    def forget_all(self, number: int) -> None:
        """Clear the index, and do not index blocks of the current sequences any more. `number` is
        the number of the order to do so; an order that was already executed is ignored."""
        if number <= self._forget_number:
            return
        self._forget_number = number
        for holding in self._tables.holdings.values():
            holding.distrusted = True
        self._pool.forget_all()

    # -- restart --------------------------------------------------------------------------

    def restart(self) -> None:
        """Remove blocks from the index that are not known to be computed, after a restart in which
        the runners kept their memory. Steps are counted from 1 again."""
        for _, block in self._recently_indexed:
            self._pool.forget(block)
        self.leftovers = Leftovers(self._pool, self._block_size)
        self._recently_indexed.clear()
        self._to_index.clear()
        self.step = 0

    def keep(self, slot: int, holding: Holding) -> None:
        """Index the blocks of a sequence that a restart has cut off, as far as they are known to be
        computed. The last ones may be partly filled; they are found by sequences that continue with
        the same tokens."""
        if self._is_enabled and not holding.distrusted:
            computed = min(self._tables.computed.of(slot), int(self._tables.known[slot]))
            tokens = self._tables.tokens[slot, :computed]
            self.complete_hashes(holding.hashes, tokens, holding.extras)
            self.leftovers.add(holding, tokens)
