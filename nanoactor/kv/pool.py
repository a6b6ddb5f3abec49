"""The pool of KV cache blocks: which are in use, which are cached, and which can be reused."""

from __future__ import annotations

from collections import OrderedDict, deque

from nanoactor.errors import ProtocolBug
from nanoactor.kv.index_changes import IndexChanges

_NOT_QUARANTINED = -1
_ALL_STEPS = 1 << 62


class BlockPool:
    """Reference counts of blocks, the index of cached content, and the eviction order.

    A block is *held* (referenced), *quarantined* (unreferenced, but a step in flight may still use
    it), *cached* (unreferenced, content indexed) or *free*. `allocate` returns free blocks first,
    then cached ones, least recently used first. A sequence releases its last block first, so a
    block is evicted before the blocks that precede it in the sequence.
    """

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        self._index: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ticket = [_NOT_QUARANTINED] * blocks
        """Number of the latest release after which no sequence held the block, by block; -1 if the
        block is not quarantined. Quarantine entries of earlier releases are void."""
        self._last_ticket = 0
        self._quarantine: deque[tuple[int, int, list[int]]] = deque()
        """(fence, release number, blocks). The fence is the step that must be done before the
        blocks may be overwritten."""
        self._completed = 0
        self.evictions = 0
        self.changes: IndexChanges | None = None
        """Unpublished changes to the index; None if the index is not published to readers."""

    @property
    def blocks(self) -> int:
        """Total number of blocks in the pool."""
        return len(self._references)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    def find(self, content: bytes) -> int | None:
        """Return the block that is indexed under `content` (a block hash, or the name of a partial
        block), in whatever state the block is; None if there is none."""
        return self._index.get(content)

    def share(self, block: int) -> bool:
        """Add a reference to a block. Return True if the block was already referenced before."""
        held = self._references[block] > 0
        self._references[block] += 1
        self._cached.pop(block, None)
        return held

    def allocate(self) -> int:
        """Allocate a block with one reference and return it. If the block was cached, its content
        is removed from the index.

        Raises `ProtocolBug` if no block is available, because the scheduler has then spent more
        blocks than there are.
        """
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.evictions += 1
            self.forget(block)
        else:
            raise ProtocolBug("no block is free or cached: more credits were spent than exist")
        self._references[block] = 1
        return block

    def forget(self, block: int) -> None:
        """Remove the content of a block from the index, if it is indexed."""
        content = self._hashes[block]
        if content is not None:
            del self._index[content]
            self._hashes[block] = None
            if self.changes is not None:
                self.changes.forget(content)

    def forget_all(self) -> None:
        """Remove the contents of all blocks from the index; cached blocks become free."""
        for block in [*self._index.values()]:
            self.forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def remember(self, block: int, content: bytes) -> bool:
        """Index a block under `content` (a block hash, or the name of a partial block), unless the
        block or the content is already indexed. Return True if it was added."""
        if content in self._index or self._hashes[block] is not None:
            return False
        self._index[content] = block
        self._hashes[block] = content
        if self.changes is not None:
            self.changes.remember(content)
        return True

    def content_of(self, block: int) -> bytes | None:
        """Return the block hash, or the name of a partial block, under which a block is indexed;
        None if it is not indexed."""
        return self._hashes[block]

    def is_held(self, block: int) -> bool:
        """Return True if any sequence holds a reference to the block."""
        return self._references[block] > 0

    def publish_index(self) -> None:
        """Publish the whole index, and from now on all changes to it, through `changes`."""
        self.changes = self.changes or IndexChanges()
        self.changes.republish(self._index)

    def restart(self) -> None:
        """Make all unreferenced blocks available after a restart, when no step is in flight. Steps
        are counted from 1 again."""
        self.complete(_ALL_STEPS)
        self._completed = 0

    def distrust(self, blocks: set[int]) -> None:
        """Remove the contents of these blocks from the index; cached blocks become free."""
        for block in blocks:
            self.forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def release(self, blocks: list[int], fence: int) -> int:
        """Drop one reference to each block. Return the number of blocks that become unreferenced.
        Raises `ProtocolBug` if a block has no reference.

        The unreferenced blocks become available once step `fence` is complete. They will be evicted
        in the order of `blocks`.
        """
        orphans = []
        self._last_ticket += 1
        for block in blocks:
            if self._references[block] <= 0:
                raise ProtocolBug(f"block {block} is released but not held")
            self._references[block] -= 1
            if not self._references[block]:
                self._ticket[block] = self._last_ticket
                orphans.append(block)
        if orphans:
            self._quarantine.append((fence, self._last_ticket, orphans))
            self.complete(self._completed)
        return len(orphans)

    def complete(self, step: int) -> None:
        """Record that all steps up to `step` are done, and make the unreferenced blocks that waited
        for these steps available."""
        self._completed = max(self._completed, step)
        while self._quarantine and self._quarantine[0][0] <= self._completed:
            _, ticket, blocks = self._quarantine.popleft()
            for block in blocks:
                # Skip blocks that are referenced again, or that were released once more after this
                # entry.
                if not self._references[block] and self._ticket[block] == ticket:
                    self._make_available(block)

    def _make_available(self, block: int) -> None:
        self._ticket[block] = _NOT_QUARANTINED
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def check(self, holders: dict[int, int]) -> None:
        """Raise `ProtocolBug` unless the reference counts equal `holders` (number of references by
        block) and every block is in exactly one state."""
        for block, count in enumerate(self._references):
            if count != holders.get(block, 0):
                raise ProtocolBug(
                    f"block {block} has {count} references, but {holders.get(block, 0)} users"
                )
        quarantined = [
            block
            for block, ticket in enumerate(self._ticket)
            if ticket != _NOT_QUARANTINED and not self._references[block]
        ]
        states = [*self._free, *self._cached, *quarantined]
        held = sum(1 for count in self._references if count)
        if len(set(states)) != len(states) or len(states) + held != len(self._references):
            raise ProtocolBug(
                f"some blocks are in two states or in none: {held} are held and {len(states)} are "
                f"free, cached or quarantined, of {len(self._references)} in all"
            )
        for content, block in self._index.items():
            if self._hashes[block] != content:
                raise ProtocolBug(f"block {block} is indexed under content that it does not hold")
