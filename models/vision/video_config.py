"""Resizing of video frames, as configured by a checkpoint. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.fields import read_bool, read_positive_int
from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.image_config import MAX_ASPECT_RATIO, ImageConfig, parse_image_config

_FILE = "video_preprocessor_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class VideoConfig:
    """A checkpoint's settings for resizing video frames."""

    min_pixels: int
    """Minimum total area of all frames in pixels. Smaller videos are enlarged."""
    max_pixels: int
    """Maximum total area of all frames in pixels. Larger videos are reduced."""
    factor: int
    """Side in pixels of the square that becomes one token. The sides of resized frames are
    multiples of it."""
    temporal_patch_size: int
    """Number of frames in a temporal patch, which becomes one grid of tokens."""
    max_frames: int
    max_frame_tokens: int | None = None
    """Maximum number of tokens of one frame; None if only the total area is limited."""

    @property
    def max_tokens_per_patch(self) -> int:
        """Maximum number of tokens of a temporal patch."""
        if self.max_frame_tokens is None:
            return self.max_pixels // self.temporal_patch_size // self.factor**2
        return int(self.max_pixels * 1.05) // self.factor**2  # 5 percent: see `_max_area`

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to which each of a video's frames is resized.

        This is `smart_resize` of transformers' `Qwen3VLVideoProcessor`. Raises `ValueError` if
        there are too few or too many frames, or if one side is more than `MAX_ASPECT_RATIO` times
        the other.
        """
        if not self.temporal_patch_size <= frames <= self.max_frames:
            raise ValueError(
                f"a video must have {self.temporal_patch_size} to {self.max_frames} frames, but "
                f"this one has {frames}"
            )
        factor, original = self.factor, (height, width)
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError(
                f"a video of {original[1]} x {original[0]} pixels is too narrow: its longer side "
                f"may be at most {MAX_ASPECT_RATIO} times the shorter one"
            )
        max_area, area = self._max_area(frames), frames * height * width
        padded_frames = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        rounded = tuple(round(side / factor) * factor for side in (height, width))
        if padded_frames * rounded[0] * rounded[1] > max_area:
            shrink = math.sqrt(area / max_area)
            sides = (math.floor(side / shrink / factor) * factor for side in (height, width))
            rounded = tuple(max(factor, side) for side in sides)
        elif padded_frames * rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            rounded = tuple(math.ceil(side * grow / factor) * factor for side in (height, width))
        return rounded[0], rounded[1]

    def _max_area(self, frames: int) -> int:
        if self.max_frame_tokens is None:
            return self.max_pixels
        frame_area = min(self.max_frame_tokens * self.factor**2, self.max_pixels // frames)
        return max(frame_area, int(self.min_pixels * 1.05)) * frames


def read_video_config(
    directory: Path, vision: VisionConfig, images: ImageConfig
) -> VideoConfig | None:
    """Return the video settings in `processor_config.json` or, if it has none, in
    `video_preprocessor_config.json`. Return None if neither file has any. This is the order in
    which transformers looks for them.

    Raises `ModelError` if a file is invalid, and `UnsupportedModel` if a setting is not
    implemented.
    """
    for name, key in (("processor_config.json", "video_processor"), (_FILE, None)):
        path = directory / name
        if path.exists():
            raw = read_json(path)
            if key is None or isinstance(raw.get(key), dict):
                return parse_video_config(raw if key is None else raw[key], vision, images, path)
    return None


def parse_video_config(
    raw: Mapping[str, Any],
    vision: VisionConfig,
    images: ImageConfig,
    origin: object = "video config",
) -> VideoConfig:
    """Return the configuration in `raw`, the parsed JSON object. `origin` names its source in error
    messages. Raises the same errors as `read_video_config`."""
    areas = parse_image_config(raw, vision, origin)
    if (areas.rescale, areas.mean, areas.std) != (images.rescale, images.mean, images.std):
        raise UnsupportedModel(
            f"{origin}: rescale_factor, image_mean and image_std must have the same values "
            "as in preprocessor_config.json"
        )
    capped = read_bool(raw, "cap_pixels_per_frame", origin, False)
    max_frames = read_positive_int(raw, "max_frames", origin, 768)
    if max_frames < vision.temporal_patch_size:
        raise ModelError(
            f"{origin}: max_frames must be at least the temporal_patch_size of the vision "
            f"tower ({vision.temporal_patch_size}), got {max_frames}"
        )
    max_frame_tokens = read_positive_int(raw, "max_video_tokens", origin, 768) if capped else None
    return VideoConfig(
        min_pixels=areas.min_pixels,
        max_pixels=areas.max_pixels,
        factor=areas.factor,
        temporal_patch_size=vision.temporal_patch_size,
        max_frames=max_frames,
        max_frame_tokens=max_frame_tokens,
    )
