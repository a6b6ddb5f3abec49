"""Resizing of images and normalization of their pixels, as configured by a checkpoint. Imports no
torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.fields import (
    read_bool,
    read_non_negative_number,
    read_number,
    read_positive_int,
)
from nanoactor.models.vision.config import VisionConfig

MAX_ASPECT_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter side, as in transformers."""
_FILE = "preprocessor_config.json"
_BICUBIC = 3
_MAX_PIXELS = 1 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class ImageConfig:
    """A checkpoint's settings for resizing and normalizing images."""

    min_pixels: int
    """Minimum area in pixels. Smaller images are enlarged."""
    max_pixels: int
    """Maximum area in pixels. Larger images are reduced."""
    factor: int
    """Side in pixels of the square that becomes one token. The sides of resized images are
    multiples of it."""
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to which an image is resized.

        Both are multiples of `factor`, with about the image's aspect ratio, as in `smart_resize`
        of transformers. Raises `ValueError` if a side is 0 or more than `MAX_ASPECT_RATIO` times
        the other.
        """
        longer, shorter = max(height, width), min(height, width)
        if shorter < 1 or longer > MAX_ASPECT_RATIO * shorter:
            raise ValueError(
                f"an image of {width} x {height} pixels is too narrow: its longer side may be "
                f"at most {MAX_ASPECT_RATIO} times the shorter one"
            )
        factor, area = self.factor, height * width
        rounded = tuple(round(side / factor) * factor for side in (height, width))
        if rounded[0] * rounded[1] > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            sides = (math.floor(side / shrink / factor) * factor for side in (height, width))
            rounded = tuple(max(factor, side) for side in sides)
        elif rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            rounded = tuple(math.ceil(side * grow / factor) * factor for side in (height, width))
        return rounded[0], rounded[1]

    def pixel_table(self) -> NDArray[np.float32]:
        """Return the normalized value of every 8-bit value in every channel, float32 (channels,
        256).

        Rounding is that of transformers' NumPy backend, so the results are bit-identical on any
        device.
        """
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        table: NDArray[np.float32] = (scaled[None] - mean[:, None]) / std[:, None]
        return table


def read_image_config(directory: Path, vision: VisionConfig) -> ImageConfig:
    """Return the image settings in `processor_config.json` or, if it has none, in
    `preprocessor_config.json`. This is the order in which transformers looks for them.

    Raises `ModelError` if neither file has settings or a file is invalid, and `UnsupportedModel` if
    a setting is not implemented.
    """
    for name, key in (("processor_config.json", "image_processor"), (_FILE, None)):
        path = directory / name
        if path.exists():
            raw = read_json(path)
            if key is None or isinstance(raw.get(key), dict):
                return parse_image_config(raw if key is None else raw[key], vision, path)
    raise ModelError(f"{directory} has no {_FILE}, which is required for resizing images")


def parse_image_config(
    raw: Mapping[str, Any], vision: VisionConfig, origin: object = "image config"
) -> ImageConfig:
    """Return the configuration in `raw`, the parsed JSON object. `origin` names its source in error
    messages. Raises the same errors as `read_image_config`."""
    size = raw.get("size") or {}
    if not isinstance(size, dict):
        raise ModelError(f"{origin}: size must be an object, got {size!r}")
    # There are no defaults: those of transformers' classes are meant for other families.
    min_pixels = _read_area(raw.get("min_pixels"), size, "shortest_edge", origin)
    max_pixels = _read_area(raw.get("max_pixels"), size, "longest_edge", origin)
    if min_pixels > max_pixels:
        raise ModelError(
            f"{origin}: the minimum area, {min_pixels} pixels, exceeds the maximum area, "
            f"{max_pixels} pixels"
        )
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not read_bool(raw, key, origin, True):
            raise UnsupportedModel(f"{origin}: {key} must be true; false is not supported")
    if raw.get("resample", _BICUBIC) != _BICUBIC:
        raise UnsupportedModel(
            f"{origin}: resample is {raw['resample']!r}, but only 3 (bicubic) is supported"
        )
    for key, expected in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.merge_size),
    ):
        if read_positive_int(raw, key, origin, expected) != expected:
            raise ModelError(
                f"{origin}: {key} is {raw[key]}, but the vision tower requires {expected}"
            )
    return ImageConfig(
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        factor=vision.patch_size * vision.merge_size,
        rescale=read_non_negative_number(raw, "rescale_factor", origin, 1 / 255),
        mean=_read_channels(raw, "image_mean", vision.channels, origin),
        std=_read_channels(raw, "image_std", vision.channels, origin),
    )


def _read_area(override: Any, size: Mapping[str, Any], name: str, origin: object) -> int:
    """Return an area in pixels: `override` (min_pixels or max_pixels) if it is not None, else the
    value of the key `name` in `size`."""
    value = size.get(name) if override is None else override
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_PIXELS:
        raise ModelError(f"{origin}: {name} must be a positive integer, got {value!r}")
    return value


def _read_channels(
    raw: Mapping[str, Any], key: str, channels: int, origin: object
) -> tuple[float, ...]:
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != channels:
        raise ModelError(f"{origin}: {key} must be a list of {channels} numbers, got {values!r}")
    numbers = tuple(read_number({key: value}, key, origin, 0.0) for value in values)
    if key == "image_std" and 0.0 in numbers:
        raise ModelError(f"{origin}: image_std must not contain 0")
    return numbers
