"""Pictures and videos, undecoded: the facts known about them before they are decoded."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.models.vision.video_config import VideoConfig

PIECE_BYTES = 256 << 10
"""Maximum size of an item's bytes or pixels in one message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """A picture, or the frames of a video, undecoded or as pixels."""

    form: str
    """"" for a file in a format of its own; else "RGB", "RGBA" or "L"."""
    shape: tuple[int, ...]
    """Height and width of pixels."""
    area: tuple[int, int]
    """The least and the largest area in pixels to which it is resized; of a video, that of all
    frames together."""
    data: bytes | bytearray
    frames: tuple[int, ...] = ()
    """Size in bytes of each frame in a video's `data`; empty for a picture."""
    times: tuple[float, ...] = ()
    """Times in seconds of a video's temporal patches. Pixels do not depend on them."""

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return len(self.data)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadItem:
    """A picture or a video, without its pixels."""

    key: bytes
    """16 bytes that name its content and how it is processed."""
    grid: tuple[int, int, int]
    """Temporal patches, rows and columns of tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unusable:
    """The reason for which a picture or a video cannot be used."""

    reason: str
    is_refused: bool = False
    """True if the machine is at fault, for example out of memory."""


def _nothing() -> None:
    pass


class MediaReader:
    """Reads headers, and decodes; needs Pillow."""

    def __init__(
        self, images: ImageConfig, salt: bytes, max_pixels: int, videos: VideoConfig | None = None
    ) -> None:
        """`salt` keeps outsiders from constructing two pictures with one key; `max_pixels` bounds
        a picture, or a frame, before it is resized."""
        from nanoactor.vision import pictures

        self._images, self._videos = images, videos
        self._salt, self._max_pixels = salt, max_pixels
        self._pictures = pictures

    def size_of(self, media: Media, before: Callable[[], None] = _nothing) -> tuple[int, int]:
        """Return the height and width to which it is resized. Raises `InvalidRequest` for an
        invalid picture, one too large or too narrow, and for frames of different sizes. `before` is
        called before each frame is checked."""
        least, most = media.area
        try:
            if not media.frames:
                height, width = self._given_size(media, media.data)
                images = dataclasses.replace(self._images, min_pixels=least, max_pixels=most)
                return images.fit(height, width)
            assert self._videos is not None
            videos = dataclasses.replace(self._videos, min_pixels=least, max_pixels=most)
            return videos.fit(len(media.frames), *self._frame_size(media, before))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def _given_size(self, media: Media, data: bytes | bytearray) -> tuple[int, int]:
        """Return the height and width of a picture, or of a frame, as it was given."""
        if media.form:
            return media.shape[0], media.shape[1]
        header = self._pictures.read_header(data, self._max_pixels)
        return header.height, header.width

    def _frame_size(self, media: Media, before: Callable[[], None]) -> tuple[int, int]:
        first = None
        for number, data in enumerate(_frames(media), 1):
            before()
            try:
                size = self._given_size(media, data)
            except InvalidRequest as error:
                raise InvalidRequest(f"frame {number}: {error}") from None
            first = first or size
            if size != first:
                raise InvalidRequest(
                    f"frame {number} has {size[1]} x {size[0]} pixels, but the first has "
                    f"{first[1]} x {first[0]}: all frames must have the same size"
                )
        assert first is not None
        return first

    def read(self, media: Media, before: Callable[[], None] = _nothing) -> ReadItem:
        """Compute the key and the grid of a picture or a video. Raises `InvalidRequest`."""
        height, width = self.size_of(media, before)
        digest = hashlib.blake2b(digest_size=16, key=self._salt)
        digest.update(f"{media.form} {media.shape} {height} {width} {media.frames} ".encode())
        digest.update(media.data)
        side, frames = self._images.factor, 1
        if media.frames:
            assert self._videos is not None
            frames = -(-len(media.frames) // self._videos.together)
        return ReadItem(digest.digest(), (frames, height // side, width // side))

    def decode(self, media: Media, before: Callable[[], None] = _nothing) -> NDArray[np.uint8]:
        """Return its pixels, (frames, height, width, 3). `before` is called before each frame is
        looked at or decoded, and may raise to break it off. Raises `InvalidRequest`."""
        height, width = self.size_of(media, before)
        if not media.frames:
            before()
            return self._decode(media, media.data, height, width)[None]
        pixels = np.empty((len(media.frames), height, width, 3), np.uint8)
        for number, data in enumerate(_frames(media)):
            before()
            try:
                pixels[number] = self._decode(media, data, height, width)
            except InvalidRequest as error:
                raise InvalidRequest(f"frame {number + 1}: {error}") from None
        return pixels

    def _decode(
        self, media: Media, data: bytes | bytearray, height: int, width: int
    ) -> NDArray[np.uint8]:
        from PIL import Image

        if not media.form:
            return self._pictures.decode(data, height, width)
        height_now, width_now = media.shape
        image = Image.frombytes(media.form, (width_now, height_now), bytes(data))
        return self._pictures.resize_image(image, height, width)


def _frames(media: Media) -> Iterator[bytes | bytearray]:
    at = 0
    for size in media.frames:
        yield media.data[at : at + size]
        at += size
