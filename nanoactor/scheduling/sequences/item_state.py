"""The images and videos of a sequence, and their entries in the encoder cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanoactor.media.units import EncoderLimits, EncodeUnits
from nanoactor.messages.vision import Items
from nanoactor.runtime.codec import copy_arrays


@dataclasses.dataclass(slots=True, eq=False)
class EncoderEntry:
    """An entry of the encoder cache: an image or video that live sequences need."""

    number: int
    key: bytes
    worker: int
    units: EncodeUnits
    planned: int
    """Number of units (parts of the encoding, done in order) that planned steps encode."""
    users: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)
    """(sequence, index of this item in that sequence) of each user of the entry, by uid."""
    pixels: int = 0
    """Number of the request for the item's pixels; 0 if the pixels are not requested."""
    source: int = -1
    """Uid of the sequence whose request supplies the bytes to decode; -1 if there is none."""
    retired_at: int = 0
    """Number of the latest turn (message to the block manager) with an admission, as of the time
    when the last user left."""

    @property
    def is_complete(self) -> bool:
        """True if the planned steps encode the whole item."""
        return self.planned == self.units.count

    def restart(self) -> None:
        """Plan the units of a temporal patch that is not completely encoded again, because its
        pixels are dropped."""
        self.planned = self.units.complete_units(self.planned)


@dataclasses.dataclass(slots=True, eq=False)
class SequenceItems:
    """The images and videos of one sequence. A *span* is a range of prompt tokens that stands for
    consecutive rows of an item."""

    message: Items
    keys: list[bytes]
    units: list[EncodeUnits]
    spans: list[tuple[int, int, int, int]]
    """(item, first row, first token, end token (exclusive)) of each span, in prompt order."""
    stops: list[int]
    """Index after the last prompt token of each item."""
    pages: int
    short: int = 0
    """Up to this many tokens before an unencoded item wait for the item instead of taking a
    separate step, as in `EncoderLimits.short_prefix`."""
    entries: list[EncoderEntry | None] = dataclasses.field(default_factory=list)
    """Cache entry of each item; None for items that the sequence no longer needs. Empty until the
    block manager has answered the admission."""

    @classmethod
    def of(cls, message: Items, limits: EncoderLimits) -> SequenceItems:
        """Return the items of a message. Its arrays are copied, since the message's memory is
        reused."""
        message = copy_arrays(message)
        grids = [tuple(grid) for grid in message.grids.tolist()]
        units = [EncodeUnits.of(grid, limits.budget, limits.depth) for grid in grids]
        spans = [
            (item, row, start, start + units[item].rows)
            for item, row, start in message.spans.tolist()
        ]
        stops = [max(stop for of, _, _, stop in spans if of == n) for n in range(len(units))]
        pages = sum(-(-each.total_rows // limits.page_rows) for each in units)
        keys = [bytes(key) for key in message.keys]
        return cls(
            message, keys, units, spans=spans, stops=stops, pages=pages, short=limits.short_prefix
        )

    def prefill_end(self, start: int, target: int) -> int:
        """Return the end (exclusive, at most `target`) of the positions from `start` on that can be
        computed now. A range of tokens that stands for rows of an image or video can be computed
        only once the encoding of all these rows is planned."""
        if not self.entries:
            return target
        for item, first_row, token_start, stop in self.spans:
            entry = self.entries[item]
            if stop <= start or entry is None:
                continue
            if entry.units.rows_after(entry.planned) < first_row + (stop - token_start):
                return min(token_start, target) if token_start - start > self.short else start
        return target
