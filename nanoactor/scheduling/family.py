"""The answers of one request, which share the blocks of its prompt."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Member(Protocol):
    """One of the answers."""

    uid: int
    slot: int
    prompt_length: int
    lent: int
    """How many of its leading blocks others of the family may hold too."""

    @property
    def scheduled(self) -> int:
        """Positions that the planned steps compute."""


M = TypeVar("M", bound=Member)


class Family(Generic[M]):
    """The answers of a request: who of them waits for whom, and holds the prompt's blocks.

    All holders have the same leading blocks: where there is one, it is a holder that lends.
    """

    def __init__(self, uids: range) -> None:
        self.uids = uids
        self.followers: list[M] = []
        """Those that wait until another has been through the prompt, by uid."""
        self._holders: dict[int, M] = {}
        self.marks: dict[int, list[int]] = {}
        """By member that was forked, or copied by a fork: names of its leading blocks, of which the
        same block has the same."""

    def lender(self, running: Iterable[M]) -> M | None:
        """Return who can lend the prompt's blocks: a holder, or else one of those that run, if its
        prompt is planned to its end."""
        mine = (member for member in running if member.uid in self.uids)
        for member in self._holders.values() if self._holders else mine:
            if member.slot >= 0 and member.scheduled >= member.prompt_length:
                return member
        return None

    def lend(self, lender: M, to: M, blocks: int, block_size: int) -> None:
        """Note that a member has so many of another's leading blocks."""
        if blocks:
            lender.lent = max(lender.lent, lender.prompt_length // block_size)
            to.lent = blocks
            self._holders[lender.uid], self._holders[to.uid] = lender, to

    def join(self, member: M, blocks: int) -> None:
        """Note that a member has so many leading blocks of one that had them as a holder."""
        if blocks:
            member.lent = blocks
            self._holders[member.uid] = member

    def leave(self, member: M) -> None:
        """Note that a member gives up its blocks."""
        self._holders.pop(member.uid, None)
        self.marks.pop(member.uid, None)
        member.lent = 0

    def held_by_others(self, member: M) -> int:
        """Count the blocks that somebody else would still hold if this one gave its own up."""
        others = (m.lent for uid, m in self._holders.items() if uid != member.uid)
        lent = min(member.lent, max(others, default=0))
        mine = self.marks.get(member.uid, [])
        forks = (marks for uid, marks in self.marks.items() if mine and uid != member.uid)
        same = (sum(map(operator.eq, mine, marks)) for marks in forks)
        return max(lent, max(same, default=0))
