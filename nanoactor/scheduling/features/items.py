"""Images and videos of live sequences: which of them need pixels, and what to encode in each
step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.media.units import EncoderLimits
from nanoactor.messages.engine import Answer
from nanoactor.messages.vision import EncoderCredits, EncodeSlices, ItemsFailed, ItemsReady
from nanoactor.scheduling.edges import Outgoing
from nanoactor.scheduling.features.feature import Ending, Feature, Handlers
from nanoactor.scheduling.features.pixel_requests import PixelRequests
from nanoactor.scheduling.resources.budget import PageBudget
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.item_state import EncoderEntry, SequenceItems
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.steps.planned import PlannedRow
from nanoactor.scheduling.steps.turns import TurnBuilder


class Images(Feature):
    """Tracks all items (images and videos) that sequences need, from the request for pixels to
    the planned encoding."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.budget = PageBudget(limits.pages)
        self.entries: dict[int, EncoderEntry] = {}
        """Entries of the encoder cache, by number."""
        self.pixels = PixelRequests(limits.ranks)
        self.encoded = 0
        """Number of cache entries that planned steps have encoded completely since the start."""
        self._admission_turn = self._answered_turn = 0
        """Number of the last turn (message to the block manager) with an admission, and of the last
        turn that was answered."""
        self._retired: deque[EncoderEntry] = deque()

    # -- admissions -----------------------------------------------------------------------

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Debit the encoder-cache pages of a sequence's items. A sequence that starts as a copy
        needs none."""
        if sequence.phase is not Phase.MATCHING:
            return
        self._admission_turn = turn
        if sequence.items is not None:
            self.budget.debit(sequence.items.pages)
            sequence.items.entries = []

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """Refund the pages that admissions did not need, release the pages that sequences gave up,
        and record which items are already encoded."""
        found = self._apply_credits(event.encoder, len(admitted))
        for sequence, of_items in zip(admitted, found, strict=True):
            if sequence is not None and sequence.items is not None:
                self._bind_entries(sequence, sequence.items, *of_items)
        self._forget_unused(event.turn)

    def _forget_unused(self, turn: int) -> None:
        """Forget the unused items that no outstanding answer of the block manager can refer to.
        `turn` is the number of the last turn (message to the block manager) that was answered."""
        self._answered_turn = turn
        while self._retired and self._retired[0].retired_at <= turn:
            entry = self._retired.popleft()
            # An entry whose users all left, came back and left again is in the queue twice.
            if not entry.users and entry.retired_at <= turn:
                self.entries.pop(entry.number, None)

    def _bind_entries(
        self, sequence: Sequence, items: SequenceItems, numbers: list[int], units: list[int]
    ) -> None:
        """Record the cache entries of a sequence that starts running, and request the pixels of
        items that are not fully encoded. `numbers` and `units` contain, for each item, the number
        of its cache entry (-1 if the sequence does not need the item) and how many of its units are
        already planned or encoded."""
        for item, (number, planned) in enumerate(zip(numbers, units, strict=True)):
            if number < 0:
                items.entries.append(None)
                continue
            entry = self.entries.get(number)
            if entry is None:
                key, worker = items.keys[item], items.message.worker
                entry = EncoderEntry(number, key, worker, items.units[item], planned)
                self.entries[number] = entry
            entry.users.setdefault(sequence.uid, (sequence, item))
            items.entries.append(entry)
        for entry in items.entries:
            if entry is not None and not entry.pixels and not entry.is_complete:
                self.pixels.request(entry)

    def _apply_credits(
        self, event: EncoderCredits | None, admissions: int
    ) -> list[tuple[list[int], list[int]]]:
        """Process refunded and freed pages. Return, for each answered admission, the cache entry
        numbers and the numbers of encoded units of its items."""
        if event is None:
            return [([], [])] * admissions
        self.budget.refund(int(event.refunds.sum()))
        for freed, fence in zip(event.freed.tolist(), event.fences.tolist(), strict=True):
            self.budget.release(freed, fence)
        numbers, units = event.numbers.tolist(), event.units.tolist()
        ends = np.cumsum(event.items).tolist()
        ranges = zip([0, *ends], ends, strict=False)
        return [(numbers[begin:end], units[begin:end]) for begin, end in ranges]

    # -- users leave ----------------------------------------------------------------------

    def plan_rows(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Release the items whose last token this step computes. Returns no rows."""
        for row in rows:
            self._advance(row.sequence)
        return []

    def _advance(self, sequence: Sequence) -> None:
        items = sequence.items
        if items is not None:
            for item, stop in enumerate(items.stops):
                if stop <= sequence.scheduled:
                    self._release(sequence, item)

    def leave(self, sequence: Sequence) -> None:
        """Release all items of a sequence whose slot is about to be released."""
        items = sequence.items
        if items is not None:
            for item in range(len(items.entries)):
                self._release(sequence, item)
            items.entries = []

    def _release(self, sequence: Sequence, item: int) -> None:
        items = sequence.items
        assert items is not None
        if not items.entries or (entry := items.entries[item]) is None:
            return
        items.entries[item] = None
        if any(other is entry for other in items.entries):  # the prompt has the same image twice
            return
        del entry.users[sequence.uid]
        if not entry.users:
            self.pixels.drop(entry)
            entry.retired_at = self._admission_turn
            if self._answered_turn >= self._admission_turn:
                self.entries.pop(entry.number)
            else:
                self._retired.append(entry)
        elif entry.source == sequence.uid and entry.pixels and not self.pixels.is_ready(entry):
            self.pixels.drop(entry)  # the bytes may be gone; use another request's bytes
            self.pixels.request(entry)

    def flush(self, turn: TurnBuilder) -> list[Outgoing]:
        """Return the messages to the vision workers, and add to `turn` (the next message to the
        block manager) the pixels that the runners may drop."""
        out = self.pixels.take_out()
        if (drops := self.pixels.take_drops()) is not None:
            turn.drop_pixels(drops)
        return out

    # -- pixels arrive and are encoded ----------------------------------------------------

    def _on_ready(self, event: ItemsReady) -> tuple[Ending, ...]:
        """Record which pixels a rank holds; ignore pixels that are no longer requested."""
        for number in event.pixels.tolist():
            self.pixels.note_ready(event.rank, number)
        return ()

    def _on_failed(self, event: ItemsFailed) -> list[Ending]:
        """Return the sequences that need pixels that could not be decoded, with their end
        reasons."""
        endings: list[Ending] = []
        for pixels, error in zip(event.pixels.tolist(), event.errors, strict=True):
            if (entry := self.pixels.fail(pixels)) is None:
                continue
            end = ends.rejected(error, refused=pixels in event.refused)
            endings += [(sequence, end) for sequence, _ in entry.users.values()]
        return endings

    @property
    def is_waiting(self) -> bool:
        """True if pixels have been requested for items that the planned steps do not encode
        completely."""
        return bool(self.pixels)

    def plan_encoding(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices of images and videos that these sequences need next, in sequence
        order and within the encoder's budget per step; None if there are none."""
        if not self.entries:
            return None
        limits, remaining = self.limits, self.limits.budget
        chosen: list[tuple[int, int, int, int]] = []
        for entry in _needed(prefilling):
            if entry.is_complete or not self.pixels.is_ready(entry):
                continue
            cost = entry.units.cost(limits.budget)
            count = min(remaining // cost, entry.units.count - entry.planned)
            if count:
                chosen.append((entry.number, entry.pixels, entry.planned, count))
                remaining -= count * cost
                self._advance_encoding(entry, count)
        if not chosen:
            return None
        numbers, pixels, firsts, counts = map(list, zip(*chosen, strict=True))
        return EncodeSlices(
            np.array(numbers, np.int64),
            np.array(pixels, np.int64),
            np.array(firsts, np.int32),
            np.array(counts, np.int32),
        )

    def _advance_encoding(self, entry: EncoderEntry, count: int) -> None:
        entry.planned += count
        if entry.planned > entry.units.count:
            raise ProtocolBug(f"item {entry.key.hex()} is encoded past its end")
        if entry.is_complete:  # the runners release its pixels on their own
            self.encoded += 1
            self.pixels.close(entry)

    def note_done(self, step: int) -> None:
        """Record that step `step` is complete, and make the pages that only waited for it
        available."""
        self.budget.complete(step)

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if an item has users, pixels are requested, or pages have not been
        returned."""
        held = [entry.number for entry in self.entries.values() if entry.users]
        self.pixels.check_idle()
        requested = self.pixels.numbers
        if held or requested or self.budget.spent:
            raise ProtocolBug(
                f"the engine is idle, but items {held} have users, pixels {requested} are "
                f"still requested and {self.budget.spent} pages have not been returned"
            )

    def figures(self) -> dict[str, int]:
        """Return the number of items that planned steps have encoded since the start."""
        return {"items_encoded": self.encoded}

    HANDLERS: ClassVar[Handlers] = {ItemsReady: _on_ready, ItemsFailed: _on_failed}


def _needed(sequences: Iterable[Sequence]) -> Iterable[EncoderEntry]:
    """Yield each cache entry that the sequences need once, in the order of the sequences and
    prompts."""
    seen: set[int] = set()
    for sequence in sequences:
        for entry in sequence.items.entries if sequence.items is not None else ():
            if entry is not None and entry.number not in seen:
                seen.add(entry.number)
                yield entry
