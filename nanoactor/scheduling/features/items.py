"""Pictures and videos in progress: which pixels to request, and what to encode in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.media.units import EncoderLimits
from nanoactor.messages.engine import Answer
from nanoactor.messages.vision import (
    CancelPixels,
    DropPixels,
    EncoderCredits,
    EncodeSlices,
    ItemsFailed,
    ItemsReady,
    WantPixels,
)
from nanoactor.scheduling.edges import VISION, Send
from nanoactor.scheduling.features.feature import Ending, Feature, Handlers
from nanoactor.scheduling.resources.budget import PageBudget
from nanoactor.scheduling.resources.rank_resources import RankResources
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.item_state import ItemWork, SequenceItems
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.steps.planned import PlannedRow
from nanoactor.scheduling.steps.turns import TurnBuilder


class Pictures(Feature):
    """The scheduler's state of all items, which are pictures and videos. `out` collects the
    messages to vision workers, and `drops` the pixels to drop."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.budget = PageBudget(limits.pages)
        self.works: dict[int, ItemWork] = {}
        """Entries of the encoder cache, by number."""
        self.out: list[tuple[int, WantPixels | CancelPixels]] = []
        """(worker, message) pairs."""
        self.drops: list[tuple[int, int]] = []
        """(pixels number, cache entry number) pairs."""
        self.encoded = 0
        """Number of cache entries that planned steps encode completely."""
        self._by_pixels: dict[int, ItemWork] = {}
        self._pixels = RankResources("pixels", limits.ranks)
        self._wants = 0
        self._sent = self._answered = 0
        """The last turn with an admission, and the last turn that was answered."""
        self._retired: deque[ItemWork] = deque()

    # -- admissions -----------------------------------------------------------------------

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Debit the pages of a sequence's items, unless the sequence starts as a copy."""
        if sequence.phase is not Phase.MATCHING:
            return
        self._sent = turn
        if sequence.items is not None:
            self.budget.debit(sequence.items.pages)
            sequence.items.works = []

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """Refund pages that admissions did not need, give back pages that sequences released, and
        record which items are already encoded."""
        found = self._answers(event.encoder, len(admitted))
        for sequence, of_items in zip(admitted, found, strict=True):
            if sequence is not None and sequence.items is not None:
                self._take(sequence, sequence.items, *of_items)
        self._forget_unused(event.turn)

    def _forget_unused(self, turn: int) -> None:
        """Forget unused items that no answer to a later turn can refer to."""
        self._answered = turn
        while self._retired and self._retired[0].retired_at <= turn:
            work = self._retired.popleft()
            # An item that has gained and lost users again is in the queue twice.
            if not work.users and work.retired_at <= turn:
                self.works.pop(work.number, None)

    def _take(
        self, sequence: Sequence, items: SequenceItems, numbers: list[int], units: list[int]
    ) -> None:
        """Record the cache entries and the planned units of a sequence's items, now that the
        sequence runs, and request missing pixels."""
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
        work.pixels = self._wants
        self._pixels.want(work.pixels)
        work.source, (sequence, item) = next(iter(work.users.items()))
        assert sequence.items is not None
        work.worker = sequence.items.message.worker  # the worker has the bytes, or gets them again
        self._by_pixels[work.pixels] = work
        self.out.append((work.worker, WantPixels(work.pixels, work.source, item, work.key)))

    def _answers(
        self, event: EncoderCredits | None, admissions: int
    ) -> list[tuple[list[int], list[int]]]:
        """Process returned pages; return the (numbers, units) of each answered admission's
        items."""
        if event is None:
            return [([], [])] * admissions
        self.budget.refund(int(event.refunds.sum()))
        for freed, fence in zip(event.freed.tolist(), event.fences.tolist(), strict=True):
            self.budget.give_back(freed, fence)
        numbers, units = event.numbers.tolist(), event.units.tolist()
        ends = np.cumsum(event.items).tolist()
        spans = zip([0, *ends], ends, strict=False)
        return [(numbers[begin:end], units[begin:end]) for begin, end in spans]

    # -- users leave ----------------------------------------------------------------------

    def choose(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Release the items whose last token this step computes."""
        for row in rows:
            self._advance(row.sequence)
        return []

    def _advance(self, sequence: Sequence) -> None:
        items = sequence.items
        if items is not None:
            for item, stop in enumerate(items.stops):
                if stop <= sequence.scheduled:
                    self._let_go(sequence, item)

    def leave(self, sequence: Sequence) -> None:
        """Release all items of a sequence that gives up its slot."""
        items = sequence.items
        if items is not None:
            for item in range(len(items.works)):
                self._let_go(sequence, item)
            items.works = []

    def _let_go(self, sequence: Sequence, item: int) -> None:
        items = sequence.items
        assert items is not None
        if not items.works or (work := items.works[item]) is None:
            return
        items.works[item] = None
        if any(other is work for other in items.works):  # the prompt has the same picture twice
            return
        del work.users[sequence.uid]
        if not work.users:
            self._drop_pixels(work)
            work.retired_at = self._sent
            if self._answered >= self._sent:
                self.works.pop(work.number)
            else:
                self._retired.append(work)
        elif work.source == sequence.uid and work.pixels and not self._is_ready(work):
            self._drop_pixels(work)  # the bytes may be gone; use another request's bytes
            self._want(work)

    def _drop_pixels(self, work: ItemWork) -> None:
        if work.pixels:
            self.out.append((work.worker, CancelPixels(np.array([work.pixels], np.int64))))
            self.drops.append((work.pixels, work.number))
            self._no_longer_wanted(work)
            work.planned = work.units.whole(work.planned)

    def _no_longer_wanted(self, work: ItemWork) -> None:
        self._pixels.drop(work.pixels)
        del self._by_pixels[work.pixels]
        work.pixels, work.source = 0, -1

    def flush(self, turn: TurnBuilder) -> list[Send]:
        """Return the messages to the vision workers, and drop pixels on the runners."""
        out: list[Send] = [(VISION.format(worker), message) for worker, message in self.out]
        drops, self.out, self.drops = self.drops, [], []
        if drops:
            pixels, numbers = zip(*drops, strict=True)
            turn.drop_pixels(DropPixels(np.array(pixels, np.int64), np.array(numbers, np.int64)))
        return out

    # -- pixels arrive and are encoded ----------------------------------------------------

    def _on_ready(self, event: ItemsReady) -> tuple[Ending, ...]:
        """Record which pixels a rank holds; pixels that are no longer wanted are ignored."""
        for number in event.pixels.tolist():
            self._pixels.note_ready(event.rank, number)
        return ()

    def _is_ready(self, work: ItemWork) -> bool:
        return work.pixels > 0 and self._pixels.is_ready(work.pixels)

    def _on_failed(self, event: ItemsFailed) -> list[Ending]:
        """End the sequences that need pixels that cannot be decoded."""
        over: list[Ending] = []
        for pixels, error in zip(event.pixels.tolist(), event.errors, strict=True):
            if (work := self._by_pixels.get(pixels)) is None:
                continue
            self.drops.append((pixels, work.number))
            self._no_longer_wanted(work)
            end = ends.rejected(error, refused=pixels in event.refused)
            over += [(sequence, end) for sequence, _ in work.users.values()]
        return over

    @property
    def waits(self) -> bool:
        """Return True if planned steps do not yet encode all items whose pixels were requested."""
        return bool(self._by_pixels)

    def encode(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices of items that these sequences need next, in the order of the sequences
        and within the step's budget; None if there are none."""
        if not self.works:
            return None
        limits, left = self.limits, self.limits.budget
        chosen: list[tuple[int, int, int, int]] = []
        for work in _needed(prefilling):
            if work.is_complete or not self._is_ready(work):
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
        if work.is_complete:  # the runners release its pixels on their own
            self.encoded += 1
            self._no_longer_wanted(work)

    def note_done(self, step: int) -> None:
        """Make the pages that were fenced by this step available."""
        self.budget.complete(step)

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if an item has users, pixels are requested, or a page is spent."""
        held = [work.number for work in self.works.values() if work.users]
        self._pixels.check_idle()
        if held or self._by_pixels or self.budget.spent:
            raise ProtocolBug(
                f"the engine is idle, but items {held} have users, pixels {[*self._by_pixels]} are "
                f"still requested and {self.budget.spent} pages have not been returned"
            )

    def figures(self) -> dict[str, int]:
        """Return the number of items encoded since the start."""
        return {"items_encoded": self.encoded}

    HANDLERS: ClassVar[Handlers] = {ItemsReady: _on_ready, ItemsFailed: _on_failed}


def _needed(sequences: Iterable[Sequence]) -> Iterable[ItemWork]:
    """Yield the cache entries that the sequences need, each once, in prompt order."""
    seen: set[int] = set()
    for sequence in sequences:
        for work in sequence.items.works if sequence.items is not None else ():
            if work is not None and work.number not in seen:
                seen.add(work.number)
                yield work
