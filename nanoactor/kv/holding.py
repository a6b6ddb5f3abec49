"""The block manager's records of the blocks that each slot holds, and of its next answer to the
scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nanoactor.kv.items import HeldItems
from nanoactor.messages.engine import Answer
from nanoactor.messages.vision import EncoderCredits


@dataclasses.dataclass(slots=True)
class Holding:
    """The block manager's record of the blocks of one sequence that has a slot."""

    uid: int
    hashes: list[bytes]
    """Hashes of the sequence's leading full blocks, of the prompt and of the known output."""
    table: list[int]
    items: HeldItems | None = None
    extras: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    """Bytes that are added to the hash of a block to identify its images, by block index."""
    request: int = -1
    """Uid of the first sequence of the same request."""
    shareable: int = 0
    """Number of leading blocks that other sequences of the request may share once they are
    computed."""
    cached: int = 0
    """Number of positions that were already computed at admission."""
    filled: int = 0
    """Number of positions that planned steps compute and whose tokens are known to the host."""
    announced: int = 0
    """Number of leading block table entries that were sent to the runners."""
    distrusted: bool = False
    """True if no more of the sequence's blocks are added to the prefix index, because some content
    is wrong or the index was cleared."""
    tainted: bool = False
    """True if the sequence has read, or would read, results of a failed row."""


class SharedBlockCounts:
    """Counts, for each slot, the blocks that other slots also hold.

    The XOR of all slots that hold a block identifies the last remaining holder. Adding or dropping
    a reference therefore takes constant time, however many holders there are.
    """

    def __init__(self, blocks: int, slots: int) -> None:
        self._holders = [0] * blocks
        self._slots = [0] * blocks
        self._shared = [0] * slots
        self._changed: set[int] = set()

    def add(self, slot: int, blocks: Iterable[int]) -> None:
        """Record that a slot holds these blocks, in addition to those it already holds."""
        for block in blocks:
            if self._holders[block]:
                self._change(slot, 1)
                if self._holders[block] == 1:
                    self._change(self._slots[block], 1)
            self._holders[block] += 1
            self._slots[block] ^= slot

    def release(self, slot: int, blocks: Iterable[int]) -> None:
        """Record that a slot releases `blocks`, which must be all blocks that it holds."""
        for block in blocks:
            self._holders[block] -= 1
            self._slots[block] ^= slot
            if self._holders[block] == 1:
                self._change(self._slots[block], -1)
        self._shared[slot] = 0
        self._changed.discard(slot)

    def _change(self, slot: int, by: int) -> None:
        self._shared[slot] += by
        self._changed.add(slot)

    def drain_changed(self) -> tuple[list[int], list[int]]:
        """Return (slots, counts) of the slots whose number of shared blocks has changed since the
        last call."""
        slots = sorted(self._changed)
        self._changed.clear()
        return slots, [self._shared[slot] for slot in slots]


@dataclasses.dataclass(slots=True)
class AnswerBuilder:
    """Collects the content of the next `Answer` to the scheduler."""

    uids: list[int] = dataclasses.field(default_factory=list)
    hits: list[int] = dataclasses.field(default_factory=list)
    refunds: list[int] = dataclasses.field(default_factory=list)
    freed: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of freed blocks, by fence (the last step that may still use them)."""
    tainted: list[int] = dataclasses.field(default_factory=list)
    is_due: bool = False
    """True if the scheduler is waiting for an answer."""

    def add_admission(self, uid: int, hits: int, refund: int) -> None:
        """Record that an admitted sequence has found `hits` computed positions, and that other
        sequences already hold `refund` of its blocks."""
        self.uids.append(uid)
        self.hits.append(hits)
        self.refunds.append(refund)
        self.is_due = True

    def add_copy(self, copy: Holding) -> None:
        """Record that the blocks of a sequence are now a copy of another sequence's."""
        if copy.tainted:
            self.tainted.append(copy.uid)
        self.is_due = True

    def add_freed(self, fence: int, blocks: int) -> None:
        """Record that `blocks` blocks become available once step `fence` is complete."""
        self.freed[fence] = self.freed.get(fence, 0) + blocks

    def message(
        self, turn: int, shared: tuple[list[int], list[int]], encoder: EncoderCredits | None
    ) -> Answer:
        """Return the `Answer` to all turns (messages from the scheduler) up to number `turn`.
        `shared` is (slots, counts) of the slots whose number of shared blocks has changed."""
        int32 = np.int32
        return Answer(
            turn,
            uids=np.array(self.uids, np.int64),
            hits=np.array(self.hits, int32),
            refunds=np.array(self.refunds, int32),
            fences=np.array([*self.freed], int32),
            freed=np.array([*self.freed.values()], int32),
            slots=np.array(shared[0], int32),
            shared=np.array(shared[1], int32),
            encoder=encoder,
            tainted=np.array(self.tainted, np.int64),
        )


def propagate_taint(
    failing: Sequence[tuple[Holding, int]], holdings: Sequence[Holding]
) -> tuple[set[int], list[Holding]]:
    """Return the blocks whose content must not be reused, and the holdings (records of a sequence's
    blocks) that contain a bad block. These holdings are marked as tainted.

    `failing` lists each holding with a failed row, together with the index of its first bad block.
    Everything that a sequence computes after a bad block is bad too, so the damage spreads to all
    holdings of these blocks. `holdings` must also include released ones whose blocks steps in
    flight may still use.
    """
    bad: set[int] = set()
    suspect: set[int] = set()
    """All blocks of the failing sequences, including good ones, since recomputing them is cheap."""
    for holding, first in failing:
        holding.distrusted = True
        suspect |= set(holding.table)
        bad |= set(holding.table[first:])
    has_grown = True
    while has_grown:
        has_grown = False
        for holding in holdings:
            first_bad = next((i for i, block in enumerate(holding.table) if block in bad), None)
            if first_bad is not None and not bad.issuperset(holding.table[first_bad:]):
                bad |= set(holding.table[first_bad:])
                has_grown = True
    readers = [holding for holding in holdings if not bad.isdisjoint(holding.table)]
    for holding in readers:
        holding.distrusted = holding.tainted = True
    return bad | suspect, readers
