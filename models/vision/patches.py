"""Pixels to the vision tower's rows, on the device: as bytes they are an eighth of the size."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.tower import Grid


class PatchMaker:
    """Rescales, normalizes and reorders; a lookup table matches transformers bit for bit."""

    def __init__(self, vision: VisionConfig, images: ImageConfig, device: torch.device) -> None:
        self._vision = vision
        table = torch.from_numpy(images.pixel_table())
        self._table = table.view(-1, 1).to(device)  # of all channels, one after the other
        self._first = torch.arange(vision.channels, dtype=torch.int32, device=device) * 256

    def __call__(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """Map uint8 (frames, height, width, channels) to float32 (patches, row_size), in the order
        of the merged squares. A picture is one frame. If frames do not fill a temporal patch, the
        last one is repeated."""
        config = self._vision
        together, side, m = config.temporal_patch_size, config.patch_size, config.merge_size
        missing = -len(pixels) % together
        if missing:
            pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
        frames, height, width, channels = pixels.shape
        grid = Grid(frames // together, height // side, width // side)
        values = F.embedding(pixels.int() + self._first, self._table)
        rows, columns = (grid.height // m, m, side), (grid.width // m, m, side)
        values = values.view((grid.frames, together, *rows, *columns, channels))
        # Squares and the patches in them first; then channels, frames, rows and columns.
        ordered = values.permute((0, 2, 5, 3, 6, 8, 1, 4, 7))
        return ordered.reshape(grid.patches, config.row_size), grid
