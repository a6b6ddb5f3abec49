"""Reading of encoded images: their headers, and their pixels as transformers reads them.

No image is decoded before its size has been checked. Requires Pillow, but not torch.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from nanoactor.errors import InvalidRequest
from nanoactor.runtime.native import native_calls
from nanoactor.vision.structure import check_metadata, check_structure

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112
# The parts of a PNG that may give its orientation: a chunk, or a text chunk with one of these
# keywords.
_PNG_EXIF = b"eXIf"
_PNG_KEYWORDS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_PNG_SIGNATURE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Size of an image in pixels, after its EXIF orientation is applied."""

    height: int
    width: int


def read_header(data: bytes | bytearray, max_pixels: int) -> Header:
    """Return an image's size without decoding the image.

    Raises `InvalidRequest` if the format is unknown or the image has more than `max_pixels`
    pixels.
    """
    with _as_invalid_request():
        image = _open(data)
        width, height = image.size
        if width * height > max_pixels:
            raise InvalidRequest(
                f"the image has {width} x {height} pixels, but at most {max_pixels} are "
                "allowed (max_image_pixels)"
            )
        orientation = (
            1 if _is_png_without_orientation(image, data) else image.getexif().get(_ORIENTATION, 1)
        )
        is_rotated = orientation in range(5, 9)
        return Header(width, height) if is_rotated else Header(height, width)


def decode(data: bytes | bytearray, height: int, width: int) -> NDArray[np.uint8]:
    """Return the pixels of an encoded image, uint8 (height, width, 3), turned upright and resized
    bicubically.

    Raises `InvalidRequest` if the image cannot be decoded. Call `read_header` first, because a
    small file may contain a huge image.
    """
    with _as_invalid_request():
        return _resize(upright(_open(data)), height, width)


def upright(image: Image.Image) -> Image.Image:
    """Return the first frame of an image in RGB, turned according to its EXIF orientation.
    Transparent pixels are placed on white.

    The result does not depend on whether the image came as bytes, as a path, or opened with
    Pillow. 16-bit grayscale keeps its 8 high bits. Raises `InvalidRequest` if the range of the
    pixel values is unknown.
    """
    is_png = image.format == "PNG"
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and is_png):
        grey = np.asarray(image)
        image = Image.fromarray((grey.clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise InvalidRequest(
            f"the image has the Pillow mode {image.mode}, whose range of values is not "
            "defined; convert it to RGB first"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def resize_image(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """Return the pixels of an already opened image, uint8 (height, width, 3), turned upright and
    resized bicubically."""
    with _as_invalid_request():
        return _resize(upright(image), height, width)


def _resize(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.uint8)


def _open(data: bytes | bytearray) -> Image.Image:
    check_structure(data)
    try:
        Image.MAX_IMAGE_PIXELS = None  # sizes are checked by `read_header`
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(
            f"the image ({len(data)} bytes) is not in a supported format; the supported formats "
            f"are {', '.join(FORMATS)}"
        ) from None
    check_metadata(image.info)
    return image


@contextmanager
def _as_invalid_request() -> Iterator[None]:
    """Convert every error that Pillow raises for broken or hostile data to `InvalidRequest`, except
    `MemoryError`."""
    with warnings.catch_warnings():
        # Pillow warns about sizes, which are bounded here, and about odd metadata.
        warnings.simplefilter("ignore")
        try:
            with native_calls():
                yield
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise InvalidRequest(f"the image cannot be decoded: {detail}") from error


def _is_png_without_orientation(image: Image.Image, data: bytes | bytearray) -> bool:
    """Return True if the image is a PNG without orientation metadata.

    The file's chunks are searched directly, because Pillow would have to decode the PNG to find
    out.
    """
    if image.format != "PNG":
        return False
    offset = _PNG_SIGNATURE
    while offset + 8 <= len(data):
        if data[offset + 4 : offset + 8] == _PNG_EXIF or data.startswith(_PNG_KEYWORDS, offset + 8):
            return False
        offset += 12 + int.from_bytes(data[offset : offset + 4], "big")
    return True
