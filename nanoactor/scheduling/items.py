"""Pictures and videos under way: whose pixels are wanted, and what of them a step encodes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.runtime.codec import copied
from nanoactor.scheduling.budget import PageBudget
from nanoactor.scheduling.edges import BLOCKS, VISION, Send
from nanoactor.vision.messages import (
    DropPixels,
    EncoderCredits,
    EncodeSlices,
    Items,
    Unwant,
    Want,
)
from nanoactor.vision.units import EncoderLimits, EncodeUnits


class HasItems(Protocol):
    """The part of a sequence that matters here."""

    uid: int
    items: SequenceItems | None

    @property
    def scheduled(self) -> int:
        """Return how many positions the planned steps compute."""


@dataclasses.dataclass(slots=True, eq=False)
class ItemWork:
    """An object of the encoder cache that sequences here need."""

    number: int
    key: bytes
    worker: int
    units: EncodeUnits
    planned: int
    """Units that the steps planned so far encode."""
    users: dict[int, tuple[HasItems, int]] = dataclasses.field(default_factory=dict)
    """By request: the sequence, and which of its items this is."""
    pixels: int = 0
    """The number under which its pixels are wanted; 0 where they are not."""
    source: int = -1
    """The request from whose bytes they are made."""
    ready: set[int] = dataclasses.field(default_factory=set)
    """Ranks that hold them."""
    retired_at: int = 0
    """How many matches had been sent when its last user left."""

    @property
    def is_complete(self) -> bool:
        """Tell whether the steps planned so far encode all of it."""
        return self.planned == self.units.count


@dataclasses.dataclass(slots=True, eq=False)
class SequenceItems:
    """The items of one sequence."""

    message: Items
    keys: list[bytes]
    units: list[EncodeUnits]
    spans: list[tuple[int, int, int, int]]
    """(item, its first row, first token, the index behind the last)."""
    stops: list[int]
    """By item: the index behind its last token."""
    pages: int
    short: int = 0
    """See `EncoderLimits`."""
    works: list[ItemWork | None] = dataclasses.field(default_factory=list)
    """Empty until its match is answered; None for what it needs no more."""

    @classmethod
    def of(cls, message: Items, limits: EncoderLimits) -> SequenceItems:
        """Read them from the message, of which they keep a copy."""
        message = copied(message)
        grids = [tuple(grid) for grid in message.grids.tolist()]
        units = [EncodeUnits.of(grid, limits.budget, limits.depth) for grid in grids]
        spans = [
            (item, row, start, start + units[item].rows)
            for item, row, start in message.spans.tolist()
        ]
        stops = [max(stop for of, _, _, stop in spans if of == n) for n in range(len(units))]
        pages = sum(-(-each.all_rows // limits.page_rows) for each in units)
        keys = [bytes(key) for key in message.keys]
        return cls(message, keys, units, spans=spans, stops=stops, pages=pages, short=limits.short)

    def reach(self, start: int, target: int) -> int:
        """Return up to where positions from `start` on can be computed, at most `target`: all rows
        of a span are planned before any of its tokens."""
        if not self.works:
            return target
        for item, first_row, at, stop in self.spans:
            work = self.works[item]
            if stop <= start or work is None:
                continue
            if work.units.rows_after(work.planned) < first_row + (stop - at):
                return min(at, target) if at - start > self.short else start
        return target


class ItemBook:
    """Everything that the scheduler knows of items. Messages for vision workers, and numbers of
    pixels to be dropped, gather in `out` and `drops`."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.budget = PageBudget(limits.pages)
        self.works: dict[int, ItemWork] = {}
        """By number."""
        self.out: list[tuple[int, Want | Unwant]] = []
        """(worker, message)."""
        self.drops: list[tuple[int, int]] = []
        """(pixels, object)."""
        self.encoded = 0
        """Objects whose last unit was planned."""
        self._by_pixels: dict[int, ItemWork] = {}
        self._wants = 0
        self._sent = self._answered = 0
        """Matches."""
        self._retired: deque[ItemWork] = deque()

    # -- matches --------------------------------------------------------------------------

    def note_match(self, sequence: HasItems) -> None:
        """A match is sent; its items' pages are spent."""
        self._sent += 1
        if sequence.items is not None:
            self.budget.debit(sequence.items.pages)
            sequence.items.works = []

    def note_answer(self) -> None:
        """A match is answered: what older ones might have told of is forgotten."""
        self._answered += 1
        while self._retired and self._retired[0].retired_at <= self._answered:
            work = self._retired.popleft()
            # It may have found users again, and lost them again: then it stands here twice.
            if not work.users and work.retired_at <= self._answered:
                self.works.pop(work.number, None)

    def take(self, sequence: HasItems, numbers: list[int], units: list[int]) -> None:
        """Take the answer for a sequence's items: it runs now."""
        items = sequence.items
        assert items is not None
        for item, (number, planned) in enumerate(zip(numbers, units, strict=True)):
            if number < 0:
                items.works.append(None)
                continue
            work = self.works.get(number)
            if work is None:
                key, worker = items.keys[item], items.message.worker
                work = ItemWork(number, key, worker, items.units[item], planned)
                self.works[number] = work
            work.users.setdefault(sequence.uid, (sequence, item))
            items.works.append(work)
        for work in items.works:
            if work is not None and not work.pixels and not work.is_complete:
                self._want(work)

    def _want(self, work: ItemWork) -> None:
        self._wants += 1
        work.pixels, work.ready = self._wants, set()
        work.source, (sequence, item) = next(iter(work.users.items()))
        assert sequence.items is not None
        work.worker = sequence.items.message.worker  # who has the bytes, or is sent them again
        self._by_pixels[work.pixels] = work
        self.out.append((work.worker, Want(work.pixels, work.source, item, work.key)))

    def answers(
        self, event: EncoderCredits | None, matches: int
    ) -> list[tuple[list[int], list[int]]]:
        """Take back pages that matches did not need, or sequences let go of; return, for each
        match answered, its items' (numbers, units)."""
        if event is None:
            return [([], [])] * matches
        self.budget.refund(int(event.refunds.sum()))
        for freed, fence in zip(event.freed.tolist(), event.fences.tolist(), strict=True):
            self.budget.give_back(freed, fence)
        numbers, units = event.numbers.tolist(), event.units.tolist()
        ends = np.cumsum(event.items).tolist()
        spans = zip([0, *ends], ends, strict=False)
        return [(numbers[begin:end], units[begin:end]) for begin, end in spans]

    # -- users leave ----------------------------------------------------------------------

    def advance(self, sequence: HasItems) -> None:
        """Let go of the items whose last token a planned step computes."""
        items = sequence.items
        if items is not None:
            for item, stop in enumerate(items.stops):
                if stop <= sequence.scheduled:
                    self._let_go(sequence, item)

    def leave(self, sequence: HasItems) -> None:
        """Let go of all items of a sequence that gives up its slot."""
        items = sequence.items
        if items is not None:
            for item in range(len(items.works)):
                self._let_go(sequence, item)
            items.works = []

    def _let_go(self, sequence: HasItems, item: int) -> None:
        items = sequence.items
        assert items is not None
        if not items.works or (work := items.works[item]) is None:
            return
        items.works[item] = None
        if any(other is work for other in items.works):  # the same picture twice in a prompt
            return
        del work.users[sequence.uid]
        if not work.users:
            self._drop_pixels(work)
            work.retired_at = self._sent
            if self._answered == self._sent:
                self.works.pop(work.number)
            else:
                self._retired.append(work)
        elif work.source == sequence.uid and work.pixels and len(work.ready) < self.limits.ranks:
            self._drop_pixels(work)  # its bytes may be gone; another's are not
            self._want(work)

    def _drop_pixels(self, work: ItemWork) -> None:
        if work.pixels:
            self.out.append((work.worker, Unwant(np.array([work.pixels], np.int64))))
            self.drops.append((work.pixels, work.number))
            del self._by_pixels[work.pixels]
            work.pixels, work.source = 0, -1
            work.planned = work.units.whole(work.planned)

    def flush(self) -> list[Send]:
        """Return what is to be told of pixels that are wanted, and of those that are not any
        more."""
        out: list[Send] = [(VISION.format(worker), message) for worker, message in self.out]
        if self.drops:
            pixels, numbers = zip(*self.drops, strict=True)
            drop = DropPixels(np.array(pixels, np.int64), np.array(numbers, np.int64))
            out.append((BLOCKS, drop))
        self.out, self.drops = [], []
        return out

    # -- pixels come, and are encoded -----------------------------------------------------

    def note_ready(self, rank: int, pixels: Iterable[int]) -> None:
        """A rank holds these pixels; nobody may wait for them any more."""
        for number in pixels:
            if (work := self._by_pixels.get(number)) is not None:
                work.ready.add(rank)

    def failed(self, pixels: int) -> list[int]:
        """Return which requests need these pixels, which will not come."""
        work = self._by_pixels.pop(pixels, None)
        if work is None:
            return []
        self.drops.append((pixels, work.number))
        work.pixels, work.source = 0, -1
        return list(work.users)

    @property
    def wanted(self) -> int:
        """Return how many items' pixels are awaited, or not all encoded."""
        return len(self._by_pixels)

    def choose(self, sequences: Iterable[HasItems]) -> EncodeSlices | None:
        """Have a step encode what these sequences need next, by their order, within the budget."""
        limits, left = self.limits, self.limits.budget
        chosen: list[tuple[int, int, int, int]] = []
        for work in _needed(sequences):
            if work.is_complete or len(work.ready) < limits.ranks:
                continue
            cost = work.units.cost(limits.budget)
            count = min(left // cost, work.units.count - work.planned)
            if count:
                chosen.append((work.number, work.pixels, work.planned, count))
                left -= count * cost
                self._encode(work, count)
        if not chosen:
            return None
        numbers, pixels, firsts, counts = map(list, zip(*chosen, strict=True))
        return EncodeSlices(
            np.array(numbers, np.int64),
            np.array(pixels, np.int64),
            np.array(firsts, np.int32),
            np.array(counts, np.int32),
        )

    def _encode(self, work: ItemWork, count: int) -> None:
        work.planned += count
        if work.planned > work.units.count:
            raise ProtocolBug(f"item {work.key.hex()} is encoded past its end")
        if work.is_complete:  # runners let go of the pixels by themselves
            self.encoded += 1
            del self._by_pixels[work.pixels]
            work.pixels, work.source = 0, -1

    def check_idle(self) -> None:
        """Raise `ProtocolBug` unless nothing is held or wanted."""
        held = [work.number for work in self.works.values() if work.users]
        if held or self._by_pixels or self.budget.spent:
            raise ProtocolBug(
                f"idle, but items {held} have users, pixels {[*self._by_pixels]} are wanted and "
                f"{self.budget.spent} pages are not back"
            )


def _needed(sequences: Iterable[HasItems]) -> Iterable[ItemWork]:
    """Go through what sequences need, each once, in the order of their prompts."""
    seen: set[int] = set()
    for sequence in sequences:
        for work in sequence.items.works if sequence.items is not None else ():
            if work is not None and work.number not in seen:
                seen.add(work.number)
                yield work
