"""Bounds on the parts of a picture's file, checked before Pillow reads the file.

Pillow processes each part of a file in Python, and a few megabytes may hold a million parts. Real
pictures stay far below these bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from nanoactor.errors import InvalidRequest

MAX_CHUNKS, MAX_OTHER_CHUNKS = 16_384, 1_024
"""Maximum number of chunks in a PNG: of all chunks, and of those without pixels. Pillow takes about
16 us for each."""
MAX_SEGMENTS, MAX_SCANS = 1_024, 100
"""Maximum number of segments before a JPEG's pixels, and of scans, each of which is a pass over all
pixels."""
MAX_GIF_BLOCKS = 4_096
"""Maximum number of blocks in a GIF before its first frame."""
MAX_RLE_BYTES = 1 << 20
"""Maximum size in bytes of a run-length encoded BMP, which Pillow decodes in Python."""
MAX_EXIF_BYTES = 1 << 16
"""Maximum size in bytes of EXIF metadata, as each entry may refer to all of it."""
_PNG, _GIF, _BMP = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a"), b"BM"
_GIF_IMAGE, _GIF_EXTENSION = 0x2C, 0x21
_START_OF_SCAN = 0xDA
_BMP_COMPRESSION, _BMP_RLE = 30, (1, 2)


def check_structure(data: bytes | bytearray) -> None:
    """Raise `InvalidRequest` if a file has so many parts that reading it would take too long.
    Malformed files are left to Pillow."""
    if data.startswith(_PNG):
        _check_png(data)
    elif data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data.startswith(_GIF):
        _check_gif(data)
    elif data.startswith(_BMP):
        _check_bmp(data)


def check_metadata(info: Mapping[Any, Any]) -> None:
    """Raise `InvalidRequest` if a picture's metadata, as read by Pillow, is too large."""
    sizes = [
        len(info.get("exif") or b""),
        len(info.get("Raw profile type exif") or "") // 2,  # two hexadecimal digits per byte
    ]
    _check(max(sizes), MAX_EXIF_BYTES, "bytes of EXIF data")


def _check(found: int, most: int, what: str) -> None:
    if found > most:
        raise InvalidRequest(
            f"the picture has at least {found} {what}, but at most {most} are allowed"
        )


def _check_png(data: bytes | bytearray) -> None:
    at, chunks, others = len(_PNG), 0, 0
    while at + 8 <= len(data):
        chunks += 1
        others += data[at + 4 : at + 8] != b"IDAT"
        _check(chunks, MAX_CHUNKS, "chunks")
        _check(others, MAX_OTHER_CHUNKS, "chunks without pixels")
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _check_jpeg(data: bytes | bytearray) -> None:
    # Within pixel data 0xFF is never followed by this byte, so a match is a marker or part of
    # metadata.
    _check(data.count(bytes((0xFF, _START_OF_SCAN))), MAX_SCANS, "scans")
    at, segments = 2, 0
    while at + 4 <= len(data) and data[at + 1] != _START_OF_SCAN:
        segments += 1
        _check(segments, MAX_SEGMENTS, "segments")
        # Pillow skips fill bytes, and anything else that is not a marker, one byte at a time.
        marked = data[at] == 0xFF and data[at + 1] not in (0x00, 0xFF)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big") if marked else 1


def _check_gif(data: bytes | bytearray) -> None:
    flags = data[10] if len(data) > 10 else 0
    at, blocks = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0), 0
    while at + 2 <= len(data) and data[at] != _GIF_IMAGE:
        at += 2 if data[at] == _GIF_EXTENSION else 1
        blocks += 1
        if data[at - 2] == _GIF_EXTENSION:
            while at < len(data) and data[at] and blocks <= MAX_GIF_BLOCKS:
                at += 1 + data[at]
                blocks += 1
        _check(blocks, MAX_GIF_BLOCKS, "blocks")


def _check_bmp(data: bytes | bytearray) -> None:
    if len(data) >= _BMP_COMPRESSION + 4:
        (compression,) = struct.unpack_from("<I", data, _BMP_COMPRESSION)
        if compression in _BMP_RLE:
            _check(len(data), MAX_RLE_BYTES, "bytes of run lengths")
