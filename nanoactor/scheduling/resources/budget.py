"""Counts of free blocks, slots and encoder-cache pages. Freed resources become available only after
the steps that may use them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from nanoactor.errors import ProtocolBug


class BlockBudget:
    """Counts free slots and the blocks that may be spent, called credits.

    `debit` spends blocks; `refund` returns debited blocks that other sequences already hold. Steps
    already planned may still use blocks that a sequence frees. Such blocks have a *fence*, the
    number of the last of these steps, and are available again once that step is complete.

    Only the block manager knows how many blocks a sequence frees. The scheduler therefore records
    the turn that releases the blocks (`expect`). Once the block manager has answered that turn, the
    blocks are pending until their fence has passed.

    Invariant: credits + pending + blocks debited and not returned == blocks. Fences are passed in
    ascending order.
    """

    def __init__(self, blocks: int, slots: int) -> None:
        self._blocks, self._slots = blocks, slots
        self._credits = blocks
        self._fenced_blocks: deque[tuple[int, int]] = deque()
        """(last step that may use them, number of freed blocks) pairs, in ascending order of
        steps."""
        self._unanswered: deque[tuple[int, int]] = deque()
        """(turn number, last step that may use the blocks) of each turn that releases blocks and
        awaits its answer, oldest first."""
        self._free_slots = list(range(slots))
        """Free slots, as a heap."""
        self._fenced_slots: deque[tuple[int, int]] = deque()
        """(last step that may use it, released slot) pairs, in ascending order of steps."""
        self._completed = 0

    @property
    def credits(self) -> int:
        """Number of blocks that may be spent now."""
        return self._credits

    @property
    def pending(self) -> int:
        """Number of freed blocks that can be spent once the steps that may still use them are
        complete."""
        return sum(freed for _, freed in self._fenced_blocks)

    @property
    def free_slots(self) -> int:
        """Number of slots that can be allocated now."""
        return len(self._free_slots)

    @property
    def oldest_unanswered(self) -> int | None:
        """Fence (the last step that may use the freed blocks) of the oldest turn that releases
        blocks and that the block manager has not answered yet; None if there is none."""
        return self._unanswered[0][1] if self._unanswered else None

    def debit(self, blocks: int) -> None:
        """Spend this many blocks. Raises `ProtocolBug` if fewer are available."""
        if blocks > self._credits:
            raise ProtocolBug(
                f"cannot spend {blocks} blocks: only {self._credits} credits are available"
            )
        self._credits -= blocks

    def refund(self, blocks: int) -> None:
        """Refund the debit for this many blocks of a sequence, because other sequences already hold
        them. The refund can be spent at once."""
        self._credits += blocks

    def expect(self, turn: int, fence: int) -> None:
        """Record that turn number `turn` (a message to the block manager) releases blocks. Steps up
        to `fence` may still use these blocks."""
        self._unanswered.append((turn, fence))

    def answer(self, turn: int, fences: Iterable[tuple[int, int]]) -> None:
        """Process the block manager's answer to all turns up to number `turn`. `fences` contains
        (fence, number of freed blocks) pairs: these blocks are available once step `fence` is
        complete. Raises `ProtocolBug` if none of these turns has such a fence."""
        expected: set[int] = set()
        while self._unanswered and self._unanswered[0][0] <= turn:
            expected.add(self._unanswered.popleft()[1])
        for fence, blocks in fences:
            if fence not in expected:
                raise ProtocolBug(
                    f"{blocks} blocks were returned with fence {fence}, but one of {expected} "
                    "was expected"
                )
            self._fenced_blocks.append((fence, blocks))
        self._release_fenced()

    def complete(self, step: int) -> None:
        """Record that step `step` is complete, and make the blocks and slots that waited for it or
        an earlier step available."""
        self._completed = step
        self._release_fenced()

    def allocate_slot(self) -> int:
        """Allocate the lowest free slot and return it. Raises `ProtocolBug` if no slot is free."""
        if not self._free_slots:
            raise ProtocolBug(f"a slot is requested, but none of the {self._slots} slots is free")
        return heapq.heappop(self._free_slots)

    def release_slot(self, slot: int, fence: int) -> None:
        """Release a slot, which can be allocated again once step `fence` is complete."""
        self._fenced_slots.append((fence, slot))
        self._release_fenced()

    def _release_fenced(self) -> None:
        while self._fenced_blocks and self._fenced_blocks[0][0] <= self._completed:
            self._credits += self._fenced_blocks.popleft()[1]
        while self._fenced_slots and self._fenced_slots[0][0] <= self._completed:
            heapq.heappush(self._free_slots, self._fenced_slots.popleft()[1])

    def check_idle(self) -> None:
        """Raise `ProtocolBug` unless all blocks and slots are available or only wait for steps to
        complete."""
        slots = len(self._free_slots) + len(self._fenced_slots)
        blocks = self._credits + self.pending
        if (slots, blocks) != (self._slots, self._blocks):
            raise ProtocolBug(
                f"the engine is idle, but {slots} of {self._slots} slots are free and "
                f"{blocks} of {self._blocks} credits have been returned"
            )


class PageBudget:
    """Counts the pages of the encoder cache that may be spent. Released pages wait for their fence,
    the number of the last planned step that may use them.

    Invariant: credits + pages waiting for a fence + pages debited and not returned == pages.
    """

    def __init__(self, pages: int) -> None:
        self._pages = self._credits = pages
        self._fenced: deque[tuple[int, int]] = deque()
        """(last step that may use them, number of released pages) pairs, in ascending order of
        steps."""
        self._completed = 0

    @property
    def credits(self) -> int:
        """Number of pages that may be spent now."""
        return self._credits

    @property
    def spent(self) -> int:
        """Number of pages that were debited and have been neither refunded nor released."""
        return self._pages - self._credits - sum(pages for _, pages in self._fenced)

    def debit(self, pages: int) -> None:
        """Spend this many pages. Raises `ProtocolBug` if fewer are available."""
        if pages > self._credits:
            raise ProtocolBug(
                f"cannot spend {pages} pages: only {self._credits} credits are available"
            )
        self._credits -= pages

    def refund(self, pages: int) -> None:
        """Refund this many debited pages that are not needed; they can be spent at once."""
        self._credits += pages

    def release(self, pages: int, fence: int) -> None:
        """Release this many pages. They can be spent again once step `fence` is complete."""
        self._fenced.append((fence, pages))
        self.complete(self._completed)

    def complete(self, step: int) -> None:
        """Record that step `step` is complete, and make the pages that waited for it or an earlier
        step available."""
        self._completed = step
        while self._fenced and self._fenced[0][0] <= step:
            self._credits += self._fenced.popleft()[1]
