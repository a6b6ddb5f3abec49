"""The pictures and videos of one sequence, and their entries in the encoder cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanoactor.media.units import EncoderLimits, EncodeUnits
from nanoactor.messages.vision import Items
from nanoactor.runtime.codec import copy_arrays


@dataclasses.dataclass(slots=True, eq=False)
class EncoderEntry:
    """An encoder cache entry that sequences need."""

    number: int
    key: bytes
    worker: int
    units: EncodeUnits
    planned: int
    """Number of units that the steps planned so far encode."""
    users: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)
    """(sequence, index of this item in the sequence) for each user, by uid."""
    pixels: int = 0
    """Number of the request for its pixels; 0 if they are not requested."""
    source: int = -1
    """Uid of the sequence that supplies the bytes for the pixels; -1 if there is none."""
    retired_at: int = 0
    """Last turn with an admission at the time when the last user left."""

    @property
    def is_complete(self) -> bool:
        """Return True if the planned steps encode all of the item."""
        return self.planned == self.units.count


@dataclasses.dataclass(slots=True, eq=False)
class SequenceItems:
    """The items of one sequence."""

    message: Items
    keys: list[bytes]
    units: list[EncodeUnits]
    spans: list[tuple[int, int, int, int]]
    """(item, first row, first token, end token (exclusive)) of each span."""
    stops: list[int]
    """Index after the last token of each item."""
    pages: int
    short: int = 0
    """Maximum number of tokens before an unencoded item that are not worth a step of their own; see
    `EncoderLimits`."""
    entries: list[EncoderEntry | None] = dataclasses.field(default_factory=list)
    """Cache entry of each item; None for items that the sequence no longer needs. Empty until the
    sequence's lookup is answered."""

    @classmethod
    def of(cls, message: Items, limits: EncoderLimits) -> SequenceItems:
        """Return the items of a message, which is copied."""
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
        """Return the position, at most `target`, up to which positions from `start` on can be
        computed. All rows of a span must be planned before any of its tokens."""
        if not self.entries:
            return target
        for item, first_row, token_start, stop in self.spans:
            entry = self.entries[item]
            if stop <= start or entry is None:
                continue
            if entry.units.rows_after(entry.planned) < first_row + (stop - token_start):
                return min(token_start, target) if token_start - start > self.short else start
        return target
