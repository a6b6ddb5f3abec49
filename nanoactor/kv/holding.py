"""The block manager's records: what slots hold, and the next answer to the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nanoactor.kv.items import HeldItems
from nanoactor.messages.engine import Answer
from nanoactor.messages.vision import EncoderCredits


@dataclasses.dataclass(slots=True)
class Holding:
    """The blocks that one slot's sequence holds."""

    uid: int
    hashes: list[bytes]
    """Of the leading full blocks: all of the prompt's, then as outputs become known."""
    table: list[int]
    items: HeldItems | None = None
    extras: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    """By block: what its hash covers of pictures."""
    request: int = -1
    """The uid of its request's first answer."""
    lends: int = 0
    """Leading blocks that another answer to the request may take once they are computed."""
    hit: int = 0
    """Positions that were computed when it got its blocks."""
    filled: int = 0
    """Positions of tokens that the host knew, computed by the steps planned so far."""
    announced: int = 0
    """Leading entries of the table that the runners know."""
    distrusted: bool = False
    """Part of its content is wrong: none of it is indexed any more."""
    tainted: bool = False
    """It has read, or would read, what a failing row computed."""


class Sharing:
    """Counts for each slot the blocks that it shares with others.

    The XOR of the slots that hold a block names the last of them, so that each reference that is
    taken or dropped costs the same, however many there are.
    """

    def __init__(self, blocks: int, slots: int) -> None:
        self._holders = [0] * blocks
        self._slots = [0] * blocks
        self._shared = [0] * slots
        self._changed: set[int] = set()

    def hold(self, slot: int, blocks: Iterable[int]) -> None:
        """Note that a slot holds these blocks too."""
        for block in blocks:
            if self._holders[block]:
                self._change(slot, 1)
                if self._holders[block] == 1:
                    self._change(self._slots[block], 1)
            self._holders[block] += 1
            self._slots[block] ^= slot

    def let_go(self, slot: int, blocks: Iterable[int]) -> None:
        """Note that a slot gives up all of its blocks."""
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

    def take(self) -> tuple[list[int], list[int]]:
        """Return the slots with counts that changed since the last call, and the counts."""
        slots = sorted(self._changed)
        self._changed.clear()
        return slots, [self._shared[slot] for slot in slots]


@dataclasses.dataclass(slots=True)
class Answers:
    """The content of the next `Answer`."""

    uids: list[int] = dataclasses.field(default_factory=list)
    hits: list[int] = dataclasses.field(default_factory=list)
    refunds: list[int] = dataclasses.field(default_factory=list)
    freed: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of freed blocks by fence."""
    tainted: list[int] = dataclasses.field(default_factory=list)
    is_due: bool = False
    """True if the scheduler waits for an answer."""

    def free(self, fence: int, blocks: int) -> None:
        """Note that blocks come back when step `fence` is done."""
        self.freed[fence] = self.freed.get(fence, 0) + blocks

    def message(
        self, turn: int, shared: tuple[list[int], list[int]], encoder: EncoderCredits | None
    ) -> Answer:
        """Return the message; `shared` holds the slots whose shared-block counts changed, and the
        new counts."""
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


def spread_doubt(
    failing: Sequence[tuple[Holding, int]], every: Sequence[Holding]
) -> tuple[set[int], list[Holding]]:
    """Return the blocks that are bad where these holdings failed from a block of theirs on, and the
    holdings with any of them, which are tainted from now on.

    What a sequence computes on blocks that are bad is bad too, so it spreads to every holder of one
    of its blocks. No other sequence can have read them: since they were computed no fence of a
    sequence that did has passed.
    """
    bad: set[int] = set()
    doubtful: set[int] = set()
    """The failing sequences' earlier blocks: to compute them again is cheap."""
    for holding, first in failing:
        holding.distrusted = True
        doubtful |= set(holding.table)
        bad |= set(holding.table[first:])
    grown = True
    while grown:
        grown = False
        for holding in every:
            at = next((at for at, block in enumerate(holding.table) if block in bad), None)
            if at is not None and not bad.issuperset(holding.table[at:]):
                bad |= set(holding.table[at:])
                grown = True
    readers = [holding for holding in every if not bad.isdisjoint(holding.table)]
    for holding in readers:
        holding.distrusted = holding.tainted = True
    return bad | doubtful, readers
