"""Conversion of pixels to the input rows of the vision tower, on the device.

Pixels are copied to the device as uint8. The rows have eight times as many bytes, because they are
float32 and repeat each image for two frames.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.tower import Grid


class PatchMaker:
    """Rescales, normalizes and reorders pixels for the vision tower. The results match those of
    transformers bit for bit."""

    def __init__(self, vision: VisionConfig, images: ImageConfig, device: torch.device) -> None:
        self._vision = vision
        table = torch.from_numpy(images.pixel_table())
        self._table = table.view(-1, 1).to(device)  # all channels, one after the other
        self._channel_offsets = (
            torch.arange(vision.channels, dtype=torch.int32, device=device) * 256
        )

    def __call__(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """Return the tower's input rows, float32 (patches, patch_values), and their grid.

        `pixels` is uint8 (frames, height, width, channels); an image is one frame. Patches that
        are merged into one token are consecutive. If the frames do not fill a temporal patch, the
        last frame is repeated.
        """
        config = self._vision
        frames_per_patch, merge = config.temporal_patch_size, config.merge_size
        side = config.patch_size
        padding = -len(pixels) % frames_per_patch
        if padding:
            pixels = torch.cat((pixels, pixels[-1:].expand(padding, -1, -1, -1)))
        frames, height, width, channels = pixels.shape
        grid = Grid(frames // frames_per_patch, height // side, width // side)
        values = F.embedding(pixels.int() + self._channel_offsets, self._table)
        rows, columns = (grid.height // merge, merge, side), (grid.width // merge, merge, side)
        values = values.view((grid.frames, frames_per_patch, *rows, *columns, channels))
        # Squares first, then the patches in them, then channels, frames, rows and columns.
        ordered = values.permute((0, 2, 5, 3, 6, 8, 1, 4, 7))
        return ordered.reshape(grid.patches, config.patch_values), grid
