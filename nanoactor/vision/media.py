"""Pictures as users give them, and what can be told of them before they are decoded."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.models.image_config import ImageConfig

PIECE_BYTES = 256 << 10
"""Of an item's bytes or pixels, in one message."""
MAX_BYTES = 64 << 20
"""Of an encoded picture."""
LOW_DETAIL = 512 * 512
"""The area in pixels to which OpenAI's detail "low" bounds a picture."""
_MOST_PIXELS = 1 << 40
_CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1}
_MODES = {channels: mode for mode, channels in _CHANNELS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """A picture, undecoded or as pixels."""

    form: str
    """"" for a file in a format of its own; else "RGB", "RGBA" or "L"."""
    shape: tuple[int, ...]
    """Of pixels: height and width."""
    area: tuple[int, int]
    """The least and the largest area in pixels to which it is resized."""
    data: bytes | bytearray

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.data)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadItem:
    """What a picture is, without its pixels."""

    key: bytes
    """16 bytes that name its content and how it is processed."""
    grid: tuple[int, int, int]
    """Temporal patches, rows and columns of tokens."""


class MediaReader:
    """Reads headers, and decodes; needs Pillow."""

    def __init__(self, images: ImageConfig, salt: bytes, max_pixels: int) -> None:
        """`salt` keeps outsiders from constructing two pictures with one key."""
        from nanoactor.vision import pictures

        self._images, self._salt, self._max_pixels = images, salt, max_pixels
        self._pictures = pictures

    def size_of(self, media: Media) -> tuple[int, int]:
        """Return the height and width to which it is resized. Raises `InvalidRequest` for what is
        no picture, or too large, or too narrow."""
        if media.form:
            height, width = media.shape
        else:
            header = self._pictures.read_header(media.data, self._max_pixels)
            height, width = header.height, header.width
        least, most = media.area
        config = dataclasses.replace(self._images, min_pixels=least, max_pixels=most)
        try:
            return config.fit(height, width)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def read(self, media: Media) -> ReadItem:
        """Name a picture and tell its grid. Raises `InvalidRequest`."""
        height, width = self.size_of(media)
        digest = hashlib.blake2b(digest_size=16, key=self._salt)
        digest.update(f"{media.form} {media.shape} {height} {width} ".encode())
        digest.update(media.data)
        side = self._images.factor
        return ReadItem(digest.digest(), (1, height // side, width // side))

    def decode(self, media: Media) -> NDArray[np.uint8]:
        """Return its pixels, (1, height, width, 3). Raises `InvalidRequest`."""
        from PIL import Image

        height, width = self.size_of(media)
        if not media.form:
            return self._pictures.decode(media.data, height, width)[None]
        height_now, width_now = media.shape
        image = Image.frombytes(media.form, (width_now, height_now), bytes(media.data))
        return self._pictures.resize_image(image, height, width)[None]


@dataclasses.dataclass(frozen=True, slots=True)
class MediaRules:
    """How pictures are taken from users; every method raises `InvalidRequest`."""

    images: ImageConfig
    max_pixels: int

    def area(self, kwargs: Mapping[str, Any], detail: str = "auto") -> tuple[int, int]:
        """Return the areas between which a picture is resized, by `mm_processor_kwargs`
        (min_pixels, max_pixels, or size with shortest_edge and longest_edge) and `detail`."""
        known = {"min_pixels", "max_pixels", "size"}
        if wrong := [str(key) for key in kwargs if key not in known]:
            raise InvalidRequest(
                f"mm_processor_kwargs: {wrong[0]!r:.50} is not known; there are min_pixels, "
                "max_pixels and size"
            )
        size = kwargs.get("size") or {}
        if not isinstance(size, Mapping):
            raise InvalidRequest(f"mm_processor_kwargs: size must be a dict, got {size!r:.50}")
        least = kwargs.get("min_pixels", size.get("shortest_edge", self.images.min_pixels))
        most = kwargs.get("max_pixels", size.get("longest_edge", self.images.max_pixels))
        for name, value in (("min_pixels", least), ("max_pixels", most)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value < _MOST_PIXELS:
                raise InvalidRequest(
                    f"mm_processor_kwargs: {name} must be a whole number from 1 to "
                    f"{_MOST_PIXELS - 1}"
                )
        if most > self.images.max_pixels:
            raise InvalidRequest(
                f"mm_processor_kwargs: max_pixels {most} exceeds the model's own limit, "
                f"{self.images.max_pixels}"
            )
        if not isinstance(detail, str) or detail not in ("auto", "low", "high"):
            raise InvalidRequest(f"detail must be 'auto', 'low' or 'high', got {detail!r:.50}")
        if detail == "low":
            most = min(most, LOW_DETAIL)
        if max(least, self.images.factor**2) > most:
            raise InvalidRequest(f"max_pixels {most} is less than min_pixels {least}, or a token's")
        return least, most

    def take(self, given: Any, area: tuple[int, int]) -> Media:
        """Return a picture as a user gives it: encoded bytes, a path, a data: URL, a Pillow image,
        or an array uint8 (height, width) or (height, width, 1, 3 or 4)."""
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
            "a picture must be its encoded bytes, a path, a data: URL, a PIL image or a uint8 "
            f"array, got {type(given).__name__}"
        )

    def _file(self, data: bytes, area: tuple[int, int]) -> Media:
        if not data:
            raise InvalidRequest("the picture is empty: it has 0 bytes")
        if len(data) > MAX_BYTES:
            raise InvalidRequest(f"the picture has {len(data)} bytes, at most {MAX_BYTES} may be")
        return Media("", (), area, data)

    def _array(self, array: NDArray[Any], area: tuple[int, int]) -> Media:
        if array.ndim == 2:
            array = array[:, :, None]
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in _MODES:
            raise InvalidRequest(
                "an array must be uint8 (height, width) or (height, width, 1, 3 or 4), got "
                f"{array.dtype} {array.shape}"
            )
        height, width, channels = array.shape
        self._check_size(height, width)
        return Media(_MODES[channels], (height, width), area, array.tobytes())

    def _pillow(self, image: Any, area: tuple[int, int]) -> Media:
        self._check_size(image.height, image.width)
        clear = "A" in image.getbands() or "transparency" in image.info
        mode = "RGBA" if clear else "RGB"
        try:
            data = image.convert(mode).tobytes()
        except Exception as error:  # Pillow decodes it only now, and raises whatever it likes
            raise InvalidRequest(f"the picture cannot be decoded: {error!r:.200}") from error
        return Media(mode, (image.height, image.width), area, data)

    def _check_size(self, height: int, width: int) -> None:
        if not 0 < height * width <= self.max_pixels:
            raise InvalidRequest(
                f"the picture has {width} x {height} pixels; at least one and at most "
                f"{self.max_pixels} are allowed (max_image_pixels)"
            )


def _read_file(path: Path) -> bytes:
    try:
        if not path.is_file():  # a device or a pipe might have no end
            raise InvalidRequest(f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_BYTES} bytes")
        return data
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the picture cannot be read: {error}") from None


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a `data:image/...;base64,` URL. Raises `InvalidRequest`."""
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidRequest(
            f"a data: URL must begin with data:image/TYPE;base64, this one does with {url[:40]!r}"
        )
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"the picture has more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data: URL is not base64: {error}") from None
