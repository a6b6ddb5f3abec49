"""Encoding of images and videos on the device, spread over several steps. The resulting features
are cached until a step's prompt tokens read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.media.units import EncodeUnits
from nanoactor.models.batch import VisualTokens
from nanoactor.models.devices.protocols import Device
from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.patches import PatchMaker
from nanoactor.models.vision.tower import TowerState, VisionTower
from nanoactor.models.vision.video_config import VideoConfig
from nanoactor.runner.batch.inputs import EncodeTask, Encoding
from nanoactor.setup.actors import ENCODER_PAGE_ROWS


class Encoder:
    """The vision tower and, on the device, a cache of its output rows: one row of features for each
    image or video token."""

    def __init__(
        self,
        tower: VisionTower,
        vision: VisionConfig,
        images: ImageConfig,
        device: Device,
        dtype: torch.dtype,
        *,
        videos: VideoConfig | None,
        pages: int,
        budget: int,
    ) -> None:
        """Allocate a cache of `pages` pages, with `ENCODER_PAGE_ROWS` rows each. `budget` is the
        maximum number of output rows that a step encodes."""
        self._tower, self._vision, self._images, self._videos = tower, vision, images, videos
        self._dtype, self._device, self._budget = dtype, device, budget
        self._patches = PatchMaker(vision, images, device.torch_device)
        self.pages = pages
        shape = pages * ENCODER_PAGE_ROWS, vision.feature_size
        self._rows = device.zeros(*shape, dtype=dtype)
        self._partial: dict[int, TowerState] = {}
        """State of each temporal patch (a group of consecutive frames) that is only partly encoded,
        by `EncodeTask.number`."""

    @property
    def nbytes(self) -> int:
        """Size of the encoder cache in bytes."""
        return self._rows.nbytes

    def read(self, rows: torch.Tensor) -> VisualTokens:
        """Return the features of the image and video tokens among a step's prompt tokens. `rows` is
        the cache row of each prompt token, int32 (tokens,); -1 for text."""
        is_visual = (rows >= 0)[:, None]
        features = self._rows.index_select(0, rows.clamp(min=0))
        return VisualTokens(is_visual, torch.where(is_visual, features, 0))

    def apply(self, work: Encoding) -> None:
        """Drop the partial encodings that no later step continues, then encode the images and
        videos of a step."""
        for number in work.dropped:
            self._partial.pop(number, None)
        for task in work.tasks:
            self.run(task)

    def reset(self) -> None:
        """Drop all partial encodings, but keep the cached rows."""
        self._partial.clear()

    def max_rows(self, max_model_len: int) -> int:
        """Return the largest number of rows that are encoded at once, for an image or for a slice
        of a video. Each row belongs to one token, so `max_model_len` is an upper limit."""
        rows = self._images.max_pixels // self._images.factor**2
        if self._videos is not None:
            # A slice has as many temporal patches as fit into the budget, or a single larger one.
            rows = max(rows, self._videos.max_tokens_per_patch, self._budget)
        return min(rows, self.pages * ENCODER_PAGE_ROWS, max_model_len)

    def run(self, task: EncodeTask) -> None:
        """Encode the units in `task`, which are parts of an image or video. Write the rows of each
        temporal patch (a group of consecutive frames) that is now complete to the cache."""
        units = self.units(task.pixels)
        cache_rows = self._upload(task.cache_rows)
        if units.parts == 1:
            self._write(task, task.first, task.count, cache_rows)
            return
        for unit in range(task.first, task.first + task.count):
            frame, part = divmod(unit, units.parts)
            if not part:
                self._partial[task.number] = self._begin(task.pixels, frame, 1)
            state = self._partial[task.number]
            self._tower.run(state, units.blocks(part, self._vision.depth))
            if part == units.parts - 1:
                rows = self._tower.finish(self._partial.pop(task.number))
                self._rows[cache_rows[frame * units.rows : (frame + 1) * units.rows]] = rows

    def units(self, pixels: NDArray[np.uint8]) -> EncodeUnits:
        """Return how the encoding of an image or video is divided into units, given its pixels,
        uint8 (frames, height, width, channels)."""
        return EncodeUnits.of_pixels(pixels.shape, self._images, self._vision, self._budget)

    def _begin(self, pixels: NDArray[np.uint8], frame: int, count: int) -> TowerState:
        frames_per_patch = self._vision.temporal_patch_size
        frames = pixels[frame * frames_per_patch : (frame + count) * frames_per_patch]
        patches, grid = self._patches(self._upload(frames))
        return self._tower.begin(patches.to(self._dtype), [grid])

    def _upload(self, array: NDArray[Any]) -> torch.Tensor:
        """Queue a copy of an array to the device by way of pinned memory. A copy from pageable
        memory would wait for all earlier steps."""
        source = torch.from_numpy(array)
        if not self._device.traits.asynchronous:
            return source
        pinned = self._device.empty_pinned(*source.shape, dtype=source.dtype)
        return pinned.copy_(source).to(self._device.torch_device, non_blocking=True)

    def _write(self, task: EncodeTask, first: int, count: int, cache_rows: torch.Tensor) -> None:
        state = self._begin(task.pixels, first, count)
        self._tower.run(state, range(self._vision.depth))
        rows_per_patch = self.units(task.pixels).rows
        self._rows[cache_rows[first * rows_per_patch : (first + count) * rows_per_patch]] = (
            self._tower.finish(state)
        )

    def warm_up(self, rows: int) -> None:
        """Encode a blank image of `rows` rows, to compile code and measure memory. Call before the
        cache is in use."""
        factor = self._images.factor
        height = next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)
        shape = 1, height * factor, rows // height * factor, self._vision.channels
        pixels = np.zeros(shape, np.uint8)
        units = self.units(pixels)
        cache_rows = np.arange(units.rows, dtype=np.int64)
        self.run(EncodeTask(pixels, 0, 0, units.count, cache_rows))
        self._device.synchronize()
