"""Units of the tower's work on an item, so that no step encodes for long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderLimits:
    """The encoder cache, and what a step may add to it. No pages: the model has no tower."""

    pages: int = 0
    page_rows: int = 1
    budget: int = 1
    """Most rows that a step encodes."""
    depth: int = 1
    """Blocks of the tower."""
    ranks: int = 1
    short: int = 0
    """So few tokens before a picture that is not encoded yet are not worth a step of their own."""


NO_ENCODER = EncoderLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeUnits:
    """An item's units, which are encoded in order.

    A temporal patch attends to itself alone, so it is a unit. One that is larger than a step's
    budget is several: a part of the tower's blocks each, all of its patches.
    """

    frames: int
    """Temporal patches; 1 for a picture."""
    rows: int
    """Rows of a temporal patch that the tower outputs: tokens."""
    parts: int
    """Units of a temporal patch."""

    @classmethod
    def of(cls, grid: tuple[int, int, int], budget: int, depth: int) -> EncodeUnits:
        """Divide an item with a `grid` of (temporal patches, rows, columns) of tokens, if a step
        may encode `budget` rows and the tower has `depth` blocks."""
        frames, height, width = grid
        rows = height * width
        return cls(frames, rows, min(depth, -(-rows // budget)))

    @classmethod
    def of_pixels(
        cls, shape: Sequence[int], images: ImageConfig, vision: VisionConfig, budget: int
    ) -> EncodeUnits:
        """Do the same from the shape of an item's pixels, (frames, height, width, channels)."""
        frames, height, width, _ = shape
        side, together = images.factor, vision.temporal_patch_size
        grid = -(-frames // together), height // side, width // side
        return cls.of(grid, budget, vision.depth)

    @property
    def count(self) -> int:
        """Return the total number of units."""
        return self.frames * self.parts

    @property
    def all_rows(self) -> int:
        """Return the rows of the whole item."""
        return self.frames * self.rows

    def cost(self, budget: int) -> int:
        """Return the cost of a unit in rows of a step's budget."""
        return min(self.rows, budget)

    def rows_after(self, units: int) -> int:
        """Return the number of leading rows that are available once `units` units are encoded."""
        return units // self.parts * self.rows

    def whole(self, units: int) -> int:
        """Return the number of the first `units` units that belong to completed temporal
        patches."""
        return units // self.parts * self.parts

    def blocks(self, part: int, depth: int) -> range:
        """Return which of the tower's blocks a part runs."""
        return range(part * depth // self.parts, (part + 1) * depth // self.parts)
