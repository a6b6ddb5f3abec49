"""Converts pixels to the tower's input rows on the device; as bytes, pixels have 1/8 the size."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.tower import Grid


class PatchMaker:
    """Rescales, normalizes and reorders pixels; results match transformers' bit for bit."""

    def __init__(self, vision: VisionConfig, images: ImageConfig, device: torch.device) -> None:
        self._vision = vision
        table = torch.from_numpy(images.pixel_table())
        self._table = table.view(-1, 1).to(device)  # all channels, one after the other
        self._first = torch.arange(vision.channels, dtype=torch.int32, device=device) * 256

    def __call__(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """Map pixels, uint8 (frames, height, width, channels), to rows, float32 (patches,
        row_size), in the order of the merged squares; return the grid as well. A picture is one
        frame. If the frames do not fill a temporal patch, the last frame is repeated."""
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
        # Squares first, then the patches in them, then channels, frames, rows and columns.
        ordered = values.permute((0, 2, 5, 3, 6, 8, 1, 4, 7))
        return ordered.reshape(grid.patches, config.row_size), grid
