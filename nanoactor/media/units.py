"""Division of the vision tower's work on an item into units, so that no step encodes for long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Size of the encoder cache, and limits of a step. 0 pages mean that the model has no tower."""

    pages: int = 0
    page_rows: int = 1
    """Number of rows in a page."""
    budget: int = 1
    """Maximum number of rows that a step encodes."""
    depth: int = 1
    """Number of blocks in the tower."""
    ranks: int = 1
    short_prefix: int = 0
    """If at most this many tokens precede a picture that is not encoded yet, they wait for it."""


NO_ENCODER = EncoderLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeUnits:
    """The units of an item, which are encoded in order.

    A temporal patch attends only to itself, so it is one unit. If it is larger than a step's
    budget, it is several units, each of which runs a part of the tower's blocks on all its patches.
    """

    frames: int
    """Number of temporal patches; 1 for a picture."""
    rows: int
    """Number of rows, and thus tokens, that the tower outputs for a temporal patch."""
    parts: int
    """Number of units of a temporal patch."""

    @classmethod
    def of(cls, grid: tuple[int, int, int], budget: int, depth: int) -> EncodeUnits:
        """Divide an item whose tokens are a `grid` of (temporal patches, rows, columns). A step may
        encode `budget` rows, and the tower has `depth` blocks."""
        frames, height, width = grid
        rows = height * width
        return cls(frames, rows, min(depth, -(-rows // budget)))

    @classmethod
    def of_pixels(
        cls, shape: Sequence[int], images: ImageConfig, vision: VisionConfig, budget: int
    ) -> EncodeUnits:
        """Divide an item whose pixels have the shape (frames, height, width, channels)."""
        frames, height, width, _ = shape
        patch_side, frames_per_patch = images.factor, vision.temporal_patch_size
        grid = -(-frames // frames_per_patch), height // patch_side, width // patch_side
        return cls.of(grid, budget, vision.depth)

    @property
    def count(self) -> int:
        """Return the total number of units."""
        return self.frames * self.parts

    @property
    def total_rows(self) -> int:
        """Return the number of rows of the whole item."""
        return self.frames * self.rows

    def cost(self, budget: int) -> int:
        """Return the number of rows of a step's budget that a unit takes."""
        return min(self.rows, budget)

    def rows_after(self, units: int) -> int:
        """Return the number of leading rows that are available once `units` units are encoded."""
        return units // self.parts * self.rows

    def complete_units(self, units: int) -> int:
        """Return the number of the first `units` units that belong to complete temporal patches."""
        return units // self.parts * self.parts

    def blocks(self, part: int, depth: int) -> range:
        """Return the indices of the tower's blocks that a part runs."""
        return range(part * depth // self.parts, (part + 1) * depth // self.parts)
