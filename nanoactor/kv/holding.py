"""The records of the block manager: what slots hold, and what the scheduler is told next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nanoactor.kv.items import HeldItems
from nanoactor.messages import Credits
from nanoactor.vision.messages import EncoderCredits


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
    announced: int = 0
    """Leading entries of the table that the runners know."""
    distrusted: bool = False
    """Some of it is not what it should be: nothing of it is indexed any more."""


@dataclasses.dataclass(slots=True)
class Answers:
    """The content of the next `Credits`."""

    uids: list[int] = dataclasses.field(default_factory=list)
    hits: list[int] = dataclasses.field(default_factory=list)
    refunds: list[int] = dataclasses.field(default_factory=list)
    freed: list[int] = dataclasses.field(default_factory=list)
    fences: list[int] = dataclasses.field(default_factory=list)
    settled: int = 0
    tainted: list[int] = dataclasses.field(default_factory=list)

    def message(self, encoder: EncoderCredits | None) -> Credits:
        """Return all of it, with what the encoder cache has to say."""
        return Credits(
            uids=np.array(self.uids, np.int64),
            hits=np.array(self.hits, np.int32),
            refunds=np.array(self.refunds, np.int32),
            freed=np.array(self.freed, np.int32),
            fences=np.array(self.fences, np.int32),
            encoder=encoder,
            settled=self.settled,
            tainted=np.array(self.tainted, np.int64),
        )


def spread_doubt(
    failing: Sequence[tuple[Holding, int]], every: Sequence[Holding]
) -> tuple[set[int], list[Holding]]:
    """Return the blocks that are bad where these holdings failed from a block of theirs on, and who
    holds any of them; failing holdings and their readers are distrusted from now on.

    What a sequence computes on blocks that are bad is bad too, so it spreads to whoever holds one
    of its blocks. Nobody else can have read them: since they were computed no fence of a sequence
    that did has passed.
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
        holding.distrusted = True
    return bad | doubtful, readers
