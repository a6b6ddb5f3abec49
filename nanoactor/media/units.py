"""Division of the vision tower's work on an item into units, so that encoding does not make any
step long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Size of the encoder cache, and limits on encoding per step. With 0 pages, the model has no
    vision tower."""

    pages: int = 0
    page_rows: int = 1
    """Number of output rows that a page of the cache holds."""
    budget: int = 1
    """Maximum number of output rows that a step encodes."""
    depth: int = 1
    """Number of blocks (transformer layers) in the vision tower."""
    ranks: int = 1
    short_prefix: int = 0
    """Maximum number of tokens before an unencoded picture that are computed together with the
    picture instead of earlier."""


NO_ENCODER = EncoderLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeUnits:
    """The units into which the encoding of an item is divided. They are encoded in order.

    A temporal patch (a group of consecutive frames) attends only to itself, so it is one unit. If
    it has more rows than a step may encode, it is divided into several units. Each of them runs
    some of the tower's blocks on the whole patch.
    """

    frames: int
    """Number of temporal patches; 1 for a picture."""
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
        """Divide an item whose pixels have the shape (frames, height, width, channels)."""
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
        """Return the number of rows that one unit uses of a step's `budget`."""
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
        """Return the indices of the tower's blocks that part number `part` of a temporal patch
        runs. The tower has `depth` blocks."""
        return range(part * depth // self.parts, (part + 1) * depth // self.parts)
