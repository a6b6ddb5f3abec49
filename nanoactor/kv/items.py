"""Handling of images and videos in the block manager: which encoder-cache entries sequences hold,
and which cached rows their tokens read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.kv.encoder_cache import EncodedItem, EncoderCache
from nanoactor.media.prompt import block_extras, visual_spans
from nanoactor.media.units import EncoderLimits, EncodeUnits
from nanoactor.messages.engine import Int32
from nanoactor.messages.vision import DropPixels, EncoderCredits, EncodeSlices, Items, VisionStep
from nanoactor.models.vision.mrope import rope_positions

_NO_SLICES = EncodeSlices(
    np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
)


@dataclasses.dataclass(slots=True)
class HeldItems:
    """The images and videos in the prompt of one sequence. A *span* is a range of prompt tokens
    that read consecutive rows of an item."""

    spans: list[tuple[int, int, int, int]]
    """(item, first row, first token, end token (exclusive)) of each span, in prompt order."""
    stops: list[int]
    """Index after the last prompt token of each item."""
    extras: dict[int, bytes]
    """Bytes that are added to the hash of a block to identify its items, by block index."""
    positions: Int32
    """Rotary positions of the tokens known at admission, (3, tokens)."""
    delta: int
    """Rotary position minus token index, for all tokens after those in `positions`."""
    encoded: list[EncodedItem | None] = dataclasses.field(default_factory=list)
    """Encoder-cache entry of each item; None if all tokens of the item were already computed."""
    released: set[int] = dataclasses.field(default_factory=set)
    """Indices of the items that the sequence has already released."""

    @classmethod
    def of(cls, items: Items, length: int, block_size: int) -> HeldItems:
        """Return the items of an admitted sequence with `length` tokens; no cache entry is acquired
        yet."""
        spans = visual_spans(items)
        rows = [
            (item, first_row, span.start, span.stop)
            for (item, first_row, _), span in zip(items.spans.tolist(), spans, strict=True)
        ]
        stops = [max(r[3] for r in rows if r[0] == item) for item in range(len(items.grids))]
        positions, delta = rope_positions(length, spans)
        return cls(rows, stops, block_extras(items, block_size), positions, delta)

    def for_copy(self) -> HeldItems:
        """Return the items for a copy of the sequence. The copy starts after the last item and
        therefore holds no cache entries."""
        return dataclasses.replace(self, encoded=[None] * len(self.stops), released=set())

    def rotary_positions(self, start: int, count: int) -> Int32:
        """Return the rotary positions of `count` tokens from `start` on, int32 (3, count)."""
        known = self.positions[:, start : start + count]
        after = np.arange(start + known.shape[1], start + count, dtype=np.int32) + self.delta
        return np.concatenate((known, np.tile(after.astype(np.int32), (3, 1))), axis=1)


class ItemManager:
    """Acquires and releases encoder-cache entries for sequences, and finds the cache rows that
    tokens read."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.cache = EncoderCache(limits.pages, limits.page_rows)
        self._answers: list[list[int]] = [[], [], [], [], [], []]
        """The columns of the next `EncoderCredits`, in field order."""
        self._has_changes = False

    def _add(self, **columns: list[int]) -> None:
        names = [field.name for field in dataclasses.fields(EncoderCredits)]
        for name, values in columns.items():
            self._answers[names.index(name)] += values

    def pop_credits(self) -> EncoderCredits | None:
        """Return the `EncoderCredits` message with everything recorded since the last call; None if
        there is nothing to report."""
        answers, self._answers = self._answers, [[], [], [], [], [], []]
        has_changes, self._has_changes = self._has_changes, False
        if not has_changes:
            return None
        items, refunds, numbers, units, freed, fences = answers
        return EncoderCredits(
            _int32(items),
            _int32(refunds),
            np.array(numbers, np.int64),
            _int32(units),
            _int32(freed),
            _int32(fences),
        )

    # -- holding --------------------------------------------------------------------------

    def match_no_items(self) -> None:
        """Record an admission without images or videos."""
        self._add(items=[0], refunds=[0])

    def match(self, held: HeldItems, items: Items, computed: int) -> None:
        """Acquire the cache entries of the items with tokens at or after position `computed`, store
        them in `held`, and record them for the next answer to the scheduler."""
        self._has_changes = True
        refund, numbers, progress = 0, [], []
        for index, stop in enumerate(held.stops):
            grid = tuple(items.grids[index].tolist())
            units = EncodeUnits.of(grid, self.limits.budget, self.limits.depth)
            if stop <= computed:
                held.encoded.append(None)
                refund += self.cache.pages_of(units.total_rows)
                numbers.append(-1)
                progress.append(0)
                continue
            item, others = self.cache.acquire(bytes(items.keys[index]), units)
            held.encoded.append(item)
            refund += others
            numbers.append(item.number)
            progress.append(item.planned)
        self._add(items=[len(numbers)], refunds=[refund], numbers=numbers, units=progress)

    def advance(self, held: HeldItems, planned: int, step: int) -> None:
        """Release the items whose tokens all lie before position `planned`. Steps up to `step` may
        still read them."""
        for index, stop in enumerate(held.stops):
            if stop <= planned:
                self._release(held, index, step)

    def free(self, held: HeldItems, fence: int) -> None:
        """Release all items that the sequence still holds. Steps up to `fence` may still read
        them."""
        for index in range(len(held.stops)):
            self._release(held, index, fence)

    def _release(self, held: HeldItems, index: int, fence: int) -> None:
        item = held.encoded[index]
        if item is None or index in held.released:
            return
        held.released.add(index)
        self._has_changes = True
        self._add(freed=[self.cache.release(item, fence)], fences=[fence])

    def distrust(self, held: HeldItems) -> None:
        """Remove a sequence's items from the cache's index because a row that read them has failed.
        They will be encoded again."""
        for item in held.encoded:
            if item is not None:
                self.cache.distrust(item)

    def drop(self, event: DropPixels) -> None:
        """Discard partly encoded temporal patches (groups of frames) of items whose pixels are
        dropped. They will be encoded again from their start."""
        for number in event.numbers.tolist():
            item = self.cache.find(number)
            if item is not None:
                item.planned = item.units.complete_units(item.planned)

    def check(self, holders: Iterable[HeldItems | None]) -> None:
        """Raise `ProtocolBug` unless the cache's reference counts match the items that `holders`
        hold; an entry of `holders` is None for a sequence without items."""
        counts: dict[EncodedItem, int] = {}
        for held in holders:
            for index, item in enumerate(held.encoded if held is not None else ()):
                assert held is not None
                if item is not None and index not in held.released:
                    counts[item] = counts.get(item, 0) + 1
        self.cache.check(self.limits.pages, counts)

    # -- steps ----------------------------------------------------------------------------

    def bind(
        self,
        slices: EncodeSlices | None,
        chunks: list[tuple[HeldItems | None, int, int]],
    ) -> VisionStep | None:
        """Return a step's work on images and videos; None if there is none. `chunks` has one
        (items, start, number of tokens) tuple for each row that computes known tokens."""
        positions = _positions(chunks)
        if slices is None and not positions.size:
            return None
        encode_slices = _NO_SLICES if slices is None else slices
        counts, pages = self._bind_slices(encode_slices)
        tokens, rows = self._bind_rows(chunks)
        return VisionStep(
            slices=encode_slices,
            page_counts=_int32(counts),
            pages=_int32(pages),
            tokens=tokens,
            rows=rows,
            positions=positions,
        )

    def _bind_slices(self, slices: EncodeSlices) -> tuple[list[int], list[int]]:
        counts, pages = [], []
        for number, first, count in zip(
            slices.numbers.tolist(), slices.firsts.tolist(), slices.counts.tolist(), strict=True
        ):
            item = self.cache.get(number)
            if first != item.planned or first + count > item.units.count:
                raise ProtocolBug(
                    f"a step encodes units {first}+{count} of item {item.key.hex()}, but "
                    f"{item.planned} of its {item.units.count} units are already planned"
                )
            item.planned += count
            counts.append(len(item.pages))
            pages += item.pages
        return counts, pages

    def _bind_rows(self, chunks: list[tuple[HeldItems | None, int, int]]) -> tuple[Int32, Int32]:
        tokens, rows, before = [_NO_ROWS], [_NO_ROWS], 0
        for held, start, count in chunks:
            for index, first_row, begin, stop in held.spans if held is not None else ():
                low, high = max(begin, start), min(stop, start + count)
                if low >= high:
                    continue
                assert held is not None
                item = self._readable(held, index, first_row + high - begin)
                wanted = np.arange(
                    first_row + low - begin, first_row + high - begin, dtype=np.int32
                )
                rows.append(self.cache.locate(item, wanted))
                tokens.append(np.arange(low - start, high - start, dtype=np.int32) + before)
            before += count
        return np.concatenate(tokens), np.concatenate(rows)

    def _readable(self, held: HeldItems, index: int, rows: int) -> EncodedItem:
        """Return the cache entry of an item. Raises `ProtocolBug` unless at least its first `rows`
        rows are encoded, since tokens would otherwise be computed without their image."""
        item = held.encoded[index]
        available = 0 if item is None else item.units.rows_after(item.planned)
        if item is None or index in held.released or available < rows:
            raise ProtocolBug(f"{rows} rows of item {index} are read, but {available} are encoded")
        return item


def _positions(chunks: list[tuple[HeldItems | None, int, int]]) -> Int32:
    """Return the rotary positions of all tokens of the chunks, (3, tokens); empty if no token is at
    or after an image."""
    if all(held is None or start + count <= held.spans[0][2] for held, start, count in chunks):
        return _NO_POSITIONS  # a prompt is plain text before its first image
    positions = [
        held.rotary_positions(start, count)
        if held is not None
        else np.tile(np.arange(start, start + count, dtype=np.int32), (3, 1))
        for held, start, count in chunks
    ]
    return np.concatenate(positions, axis=1)


_NO_ROWS: Int32 = np.empty(0, np.int32)
_NO_POSITIONS: Int32 = np.empty((3, 0), np.int32)


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)
