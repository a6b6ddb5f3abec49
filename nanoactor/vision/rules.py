"""Validation of the images and videos that users pass to the engine."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.media.prompt import patch_times
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.video_config import VideoConfig
from nanoactor.vision.media import Media
from nanoactor.vision.video import Video, frame_times

MAX_BYTES = 64 << 20
"""Maximum size in bytes of an encoded image."""
MAX_VIDEO_BYTES = 256 << 20
"""Maximum total size in bytes of a video's frames before decoding."""
LOW_DETAIL = 512 * 512
"""Maximum area in pixels, after resizing, of an image with OpenAI's detail "low"."""
_MAX_AREA = 1 << 40
_CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1}
_MODES = {channels: mode for mode, channels in _CHANNELS.items()}
_NESTED_KWARGS = ("images_kwargs", "videos_kwargs")
_PILLOW_LOCK = threading.Lock()
"""Serializes decoding of images that the user opened with Pillow. Pillow decodes lazily, and one
image may be part of several requests at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaRules:
    """Rules for the images and videos in requests. Every method raises `InvalidRequest` if a rule
    is violated."""

    images: ImageConfig
    max_pixels: int
    """Maximum number of pixels of an image, or of a frame, before resizing."""
    videos: VideoConfig | None = None
    """Video configuration; None if the model does not support videos."""

    def area(self, kwargs: Mapping[str, Any], detail: str = "auto") -> tuple[int, int]:
        """Return the minimum and maximum area in pixels of an image after resizing.

        `kwargs` is the request's `mm_processor_kwargs`, with min_pixels and max_pixels, or with
        size, which contains shortest_edge and longest_edge. `detail` is "auto", "low" or "high", as
        in OpenAI's API.
        """
        min_pixels, max_pixels = _area(_kwargs_of(kwargs, "images_kwargs"), self.images)
        if not isinstance(detail, str) or detail not in ("auto", "low", "high"):
            raise InvalidRequest(f"detail must be 'auto', 'low' or 'high', got {detail!r:.50}")
        return _check_area(
            min_pixels, min(max_pixels, LOW_DETAIL) if detail == "low" else max_pixels, self.images
        )

    def video_area(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the minimum and maximum total area in pixels of a video's frames after resizing.

        `kwargs` is the request's `mm_processor_kwargs`.
        """
        videos = self._require_videos()
        return _check_area(*_area(_kwargs_of(kwargs, "videos_kwargs"), videos), videos)

    def _require_videos(self) -> VideoConfig:
        if self.videos is None:
            raise InvalidRequest(
                "the model does not support videos: its directory has no "
                "video_preprocessor_config.json"
            )
        return self.videos

    def read_image(self, given: Any, area: tuple[int, int]) -> Media:
        """Return an image passed in any supported form.

        The forms are encoded bytes, a path, a data: URL, a Pillow image, and a uint8 array of shape
        (height, width) or (height, width, channels) with 1, 3 or 4 channels. `area` is its minimum
        and maximum area after resizing.
        """
        if isinstance(given, str) and given.startswith("data:"):
            given = decode_data_url(given)
        elif isinstance(given, str | Path):
            given = _read_file(Path(given))
        if isinstance(given, bytes | bytearray | memoryview):
            return self._file(bytes(given), area)
        if isinstance(given, np.ndarray):
            return self._array(given, area)
        pillow = sys.modules.get("PIL.Image")
        if pillow is not None and isinstance(given, pillow.Image):
            return self._pillow(given, area)
        raise InvalidRequest(
            "an image must be given as encoded bytes, a path, a data: URL, a PIL image or a "
            f"uint8 array, got {type(given).__name__}"
        )

    def _file(self, data: bytes, area: tuple[int, int]) -> Media:
        if not data:
            raise InvalidRequest("the image is empty (0 bytes)")
        if len(data) > MAX_BYTES:
            raise InvalidRequest(
                f"the image has {len(data)} bytes, but at most {MAX_BYTES} are allowed"
            )
        return Media("", (), area, data)

    def _array(self, array: NDArray[Any], area: tuple[int, int]) -> Media:
        if array.ndim == 2:
            array = array[:, :, None]
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in _MODES:
            raise InvalidRequest(
                "an image array must have the dtype uint8 and the shape (height, width) or "
                f"(height, width, channels) with 1, 3 or 4 channels, got {array.dtype} "
                f"{array.shape}"
            )
        height, width, channels = array.shape
        self._check_size(height, width)
        return Media(_MODES[channels], (height, width), area, array.tobytes())

    def _pillow(self, image: Any, area: tuple[int, int]) -> Media:
        from nanoactor.vision.image_io import upright

        self._check_size(image.height, image.width)
        try:
            with _PILLOW_LOCK:
                found = upright(image)
                data = found.tobytes()
        except InvalidRequest:
            raise
        except Exception as error:  # Pillow decodes it only now, and may raise anything
            raise InvalidRequest(f"the image cannot be decoded: {error!r:.200}") from error
        return Media("RGB", (found.height, found.width), area, data)

    def _check_size(self, height: int, width: int) -> None:
        if not 0 < height * width <= self.max_pixels:
            raise InvalidRequest(
                f"the image has {width} x {height} pixels, but must have at least one and at "
                f"most {self.max_pixels} (max_image_pixels)"
            )

    def read_video(self, given: Any, area: tuple[int, int]) -> Media:
        """Return a video passed in any supported form: a `Video`, its frames alone, or (frames,
        metadata) as in vLLM.

        Each frame may have any form that an image may have. An array of frames has the shape
        (frames, height, width, channels). `area` is the minimum and maximum total area after
        resizing.
        """
        videos, video = self._require_videos(), Video.of(given)
        frames = list(video.frames)
        if not videos.temporal_patch_size <= len(frames) <= videos.max_frames:
            raise InvalidRequest(
                f"a video must have {videos.temporal_patch_size} to {videos.max_frames} frames, "
                f"but this one has {len(frames)}"
            )
        times = frame_times(video, len(frames))
        decoded: list[Media] = []
        size = 0
        for number, frame in enumerate(frames, 1):
            media = self._frame(number, frame, area)
            decoded.append(media)
            first, size = decoded[0], size + media.size
            if (media.form, media.shape) != (first.form, first.shape):
                raise InvalidRequest(
                    f"frame {number} is {media.form or 'a file'} {media.shape}, but the first "
                    f"one is {first.form or 'a file'} {first.shape}; all frames must have the "
                    "same form and shape"
                )
            # Frames given as pixels all have the same size, so the first one determines the total
            # size.
            if max(size, media.size * len(frames) if media.form else 0) > MAX_VIDEO_BYTES:
                raise InvalidRequest(
                    f"the frames of the video have more than {MAX_VIDEO_BYTES} bytes in total; "
                    "give encoded frames, or fewer or smaller ones"
                )
        return Media(
            first.form,
            first.shape,
            area,
            b"".join(media.data for media in decoded),
            frames=tuple(media.size for media in decoded),
            times=patch_times(times, videos.temporal_patch_size),
        )

    def _frame(self, number: int, given: Any, area: tuple[int, int]) -> Media:
        try:
            return self.read_image(given, area)
        except InvalidRequest as error:
            raise InvalidRequest(f"frame {number}: {error}") from None


def _kwargs_of(kwargs: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the arguments for images or for videos: those at the top level, overridden by those
    nested under `kind` ("images_kwargs" or "videos_kwargs"), as in transformers."""
    found = {key: value for key, value in kwargs.items() if key not in _NESTED_KWARGS}
    nested = kwargs.get(kind)
    if nested is None:
        return found
    if not isinstance(nested, Mapping):
        raise InvalidRequest(f"mm_processor_kwargs: {kind} must be a dict, got {nested!r:.50}")
    return {**found, **nested}


def _area(kwargs: Mapping[str, Any], defaults: ImageConfig | VideoConfig) -> tuple[int, int]:
    """Return the minimum and maximum area in pixels from the request's arguments; the model's
    values are the defaults."""
    known = {"min_pixels", "max_pixels", "size"}
    if unknown := [str(key) for key in kwargs if key not in known]:
        raise InvalidRequest(
            f"mm_processor_kwargs: {unknown[0]!r:.50} is not a known key; the supported keys are "
            "min_pixels, max_pixels and size"
        )
    size = kwargs.get("size") or {}
    if not isinstance(size, Mapping):
        raise InvalidRequest(f"mm_processor_kwargs: size must be a dict, got {size!r:.50}")
    min_pixels = kwargs.get("min_pixels", size.get("shortest_edge", defaults.min_pixels))
    max_pixels = kwargs.get("max_pixels", size.get("longest_edge", defaults.max_pixels))
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 1 <= value < _MAX_AREA:
            raise InvalidRequest(
                f"mm_processor_kwargs: {name} must be an integer from 1 to "
                f"{_MAX_AREA - 1}, got {value!r:.50}"
            )
    if max_pixels > defaults.max_pixels:
        raise InvalidRequest(
            f"mm_processor_kwargs: max_pixels {max_pixels} exceeds the model's own limit, "
            f"{defaults.max_pixels}"
        )
    return min_pixels, max_pixels


def _check_area(
    min_pixels: int, max_pixels: int, defaults: ImageConfig | VideoConfig
) -> tuple[int, int]:
    if max(min_pixels, defaults.factor**2) > max_pixels:
        raise InvalidRequest(
            f"max_pixels must be at least min_pixels ({min_pixels}) and at least the number of "
            f"pixels in one token ({defaults.factor**2}), got {max_pixels}"
        )
    return min_pixels, max_pixels


def _read_file(path: Path) -> bytes:
    try:
        if not path.is_file():  # a device or a pipe might have no end
            raise InvalidRequest(f"{path} does not exist or is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidRequest(
                f"{path} is too large for an image: it has more than {MAX_BYTES} bytes"
            )
        return data
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the image cannot be read: {error}") from None


def decode_data_url(url: str) -> bytes:
    """Return the bytes in a `data:image/...;base64,` URL. Raises `InvalidRequest` if the URL is
    malformed or has more than `MAX_BYTES` bytes."""
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidRequest(
            'a data: URL must begin with "data:image/TYPE;base64,", but this one begins with '
            f"{url[:40]!r}"
        )
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"the image is too large: it has more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data: URL is not valid base64: {error}") from None
