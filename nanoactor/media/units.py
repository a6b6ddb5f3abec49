"""Division of the encoding of an image or video into units of work, so that no step (one forward
pass) takes too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Size of the encoder cache, which stores outputs of the vision tower, and limits on encoding
    per step. A model without a vision tower has 0 pages."""

    pages: int = 0
    page_rows: int = 1
    """Number of output rows in a page of the cache."""
    budget: int = 1
    """Maximum number of output rows that a step encodes."""
    depth: int = 1
    """Number of blocks (transformer layers) in the vision tower."""
    ranks: int = 1
    short_prefix: int = 0
    """If at most this many tokens precede an image, they do not get a step of their own: they wait
    until the image is encoded."""


NO_ENCODER = EncoderLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeUnits:
    """The units into which the encoding of an item (an image or video) is divided. They are
    encoded in order.

    A temporal patch (a group of consecutive frames) attends only to itself, so it is one unit. If
    it has more rows than a step may encode, it is divided into several units. Each of them runs
    some of the tower's blocks on the whole patch.
    """

    frames: int
    """Number of temporal patches; 1 for an image."""
    rows: int
    """Number of output rows, and thus tokens, of a temporal patch."""
    parts: int
    """Number of units per temporal patch."""

    @classmethod
    def of(cls, grid: tuple[int, int, int], budget: int, depth: int) -> EncodeUnits:
        """Divide an item whose tokens form a `grid` of (temporal patches, rows, columns).

        A step may encode `budget` output rows, and the tower has `depth` blocks.
        """
        frames, height, width = grid
        rows = height * width
        return cls(frames, rows, min(depth, -(-rows // budget)))

    @classmethod
    def of_pixels(
        cls, shape: Sequence[int], images: ImageConfig, vision: VisionConfig, budget: int
    ) -> EncodeUnits:
        """Divide an item whose pixels have the shape (frames, height, width, channels). A step may
        encode `budget` output rows."""
        frames, height, width, _ = shape
        patch_side, frames_per_patch = images.factor, vision.temporal_patch_size
        grid = -(-frames // frames_per_patch), height // patch_side, width // patch_side
        return cls.of(grid, budget, vision.depth)

    @property
    def count(self) -> int:
        """Total number of units of the item."""
        return self.frames * self.parts

    @property
    def total_rows(self) -> int:
        """Number of output rows of the whole item."""
        return self.frames * self.rows

    def cost(self, budget: int) -> int:
        """Return the number of output rows of a step's `budget` that one unit uses."""
        return min(self.rows, budget)

    def rows_after(self, units: int) -> int:
        """Return the number of leading output rows that are complete once `units` units are
        encoded."""
        return units // self.parts * self.rows

    def complete_units(self, units: int) -> int:
        """Return how many of the first `units` units belong to completely encoded temporal
        patches."""
        return units // self.parts * self.parts

    def blocks(self, part: int, depth: int) -> range:
        """Return the range of tower blocks that a unit runs. `part` is the index of the unit within
        its temporal patch, and `depth` is the number of blocks in the tower."""
        return range(part * depth // self.parts, (part + 1) * depth // self.parts)
