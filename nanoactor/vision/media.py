"""Images and videos of requests: their data, their hashes and sizes, and their decoding."""

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
"""Maximum number of bytes of an item's data or pixels in one message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """An image, or the frames of a video, as encoded files or as raw pixels."""

    form: str
    """Pillow mode of raw pixels: "RGB", "RGBA" or "L". Empty for encoded files."""
    shape: tuple[int, ...]
    """(height, width) of raw pixels; empty for encoded files."""
    area: tuple[int, int]
    """Minimum and maximum area in pixels after resizing. For a video, this is the total area of all
    frames."""
    data: bytes | bytearray
    frames: tuple[int, ...] = ()
    """Size in bytes of each frame in `data`, for a video; empty for an image."""
    times: tuple[float, ...] = ()
    """Time in seconds of each temporal patch (a group of consecutive frames) of a video. The pixels
    do not depend on the times."""

    @property
    def size(self) -> int:
        """Size of `data` in bytes."""
        return len(self.data)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadItem:
    """The hash and the size of an image or video that is not decoded yet."""

    key: bytes
    """16-byte hash of the item's content and of how it is processed."""
    grid: tuple[int, int, int]
    """(temporal patches, rows, columns) of the item's tokens. A temporal patch is a group of
    consecutive frames; an image has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unusable:
    """Result for an image or a video that cannot be used, with the reason."""

    reason: str
    is_machine_fault: bool = False
    """True if the machine caused the error, for example because it is out of memory."""


def _noop() -> None:
    pass


class MediaReader:
    """Reads the headers of images and videos, and decodes them. Requires Pillow."""

    def __init__(
        self, images: ImageConfig, salt: bytes, max_pixels: int, videos: VideoConfig | None = None
    ) -> None:
        """Create a reader. `salt` is a secret key of the hash, so that outsiders cannot construct
        two images with the same hash. `max_pixels` is the maximum number of pixels of an image,
        or of a frame, before resizing."""
        from nanoactor.vision import image_io

        self._images, self._videos = images, videos
        self._salt, self._max_pixels = salt, max_pixels
        self._image_io = image_io

    def size_of(self, media: Media, before_frame: Callable[[], None] = _noop) -> tuple[int, int]:
        """Return the height and width in pixels to which an image, or each frame of a video, is
        resized.

        `before_frame` is called before each frame is checked. Raises `InvalidRequest` if an image
        is invalid, too large or too narrow, or if frames differ in size.
        """
        min_pixels, max_pixels = media.area
        try:
            if not media.frames:
                height, width = self._original_size(media, media.data)
                images = dataclasses.replace(
                    self._images, min_pixels=min_pixels, max_pixels=max_pixels
                )
                return images.fit(height, width)
            assert self._videos is not None
            videos = dataclasses.replace(self._videos, min_pixels=min_pixels, max_pixels=max_pixels)
            return videos.fit(len(media.frames), *self._frame_size(media, before_frame))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def _original_size(self, media: Media, data: bytes | bytearray) -> tuple[int, int]:
        """Return the height and width in pixels of an image or of a frame before resizing."""
        if media.form:
            return media.shape[0], media.shape[1]
        header = self._image_io.read_header(data, self._max_pixels)
        return header.height, header.width

    def _frame_size(self, media: Media, before_frame: Callable[[], None]) -> tuple[int, int]:
        first = None
        for number, data in enumerate(_frames(media), 1):
            before_frame()
            try:
                size = self._original_size(media, data)
            except InvalidRequest as error:
                raise InvalidRequest(f"frame {number}: {error}") from None
            first = first or size
            if size != first:
                raise InvalidRequest(
                    f"frame {number} has {size[1]} x {size[0]} pixels, but the first has "
                    f"{first[1]} x {first[0]}; all frames must have the same size"
                )
        assert first is not None
        return first

    def read(self, media: Media, before_frame: Callable[[], None] = _noop) -> ReadItem:
        """Return the hash and the grid of an image or a video, computed from its encoded data and
        its headers without decoding.

        `before_frame` is called before each frame is checked. Raises `InvalidRequest` if the item
        is invalid.
        """
        height, width = self.size_of(media, before_frame)
        digest = hashlib.blake2b(digest_size=16, key=self._salt)
        digest.update(f"{media.form} {media.shape} {height} {width} {media.frames} ".encode())
        digest.update(media.data)
        token_side, frames = self._images.factor, 1
        if media.frames:
            assert self._videos is not None
            frames = -(-len(media.frames) // self._videos.temporal_patch_size)
        return ReadItem(digest.digest(), (frames, height // token_side, width // token_side))

    def decode(self, media: Media, before_frame: Callable[[], None] = _noop) -> NDArray[np.uint8]:
        """Return the resized pixels of an image or a video, uint8 (frames, height, width, 3).

        `before_frame` is called before each frame is checked or decoded, and may raise to cancel.
        Raises `InvalidRequest` if the item is invalid.
        """
        height, width = self.size_of(media, before_frame)
        if not media.frames:
            before_frame()
            return self._decode(media, media.data, height, width)[None]
        pixels = np.empty((len(media.frames), height, width, 3), np.uint8)
        for number, data in enumerate(_frames(media)):
            before_frame()
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
            return self._image_io.decode(data, height, width)
        original_height, original_width = media.shape
        image = Image.frombytes(media.form, (original_width, original_height), bytes(data))
        return self._image_io.resize_image(image, height, width)


def _frames(media: Media) -> Iterator[bytes | bytearray]:
    offset = 0
    for size in media.frames:
        yield media.data[offset : offset + size]
        offset += size
