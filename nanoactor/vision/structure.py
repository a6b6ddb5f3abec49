"""Limits on the number of parts in an image's file, checked before Pillow reads the file.

Pillow processes each part of a file in Python, and a few megabytes may contain a million parts.
Ordinary images stay far below these limits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from nanoactor.errors import InvalidRequest

MAX_CHUNKS, MAX_OTHER_CHUNKS = 16_384, 1_024
"""Maximum numbers of chunks in a PNG: in total, and without pixel data. Pillow takes about 16 us
per chunk."""
MAX_SEGMENTS, MAX_SCANS = 1_024, 100
"""Maximum number of segments before the pixels of a JPEG, and maximum number of its scans. Each
scan is a pass over all pixels."""
MAX_GIF_BLOCKS = 4_096
"""Maximum number of blocks before a GIF's first frame."""
MAX_RLE_BYTES = 1 << 20
"""Maximum size in bytes of a run-length encoded BMP, which Pillow decodes in Python code."""
MAX_EXIF_BYTES = 1 << 16
"""Maximum size in bytes of EXIF metadata. The size is limited because each entry may refer to all
of the metadata."""
_PNG, _GIF, _BMP = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a"), b"BM"
_GIF_IMAGE, _GIF_EXTENSION = 0x2C, 0x21
_START_OF_SCAN = 0xDA
_BMP_COMPRESSION, _BMP_RLE = 30, (1, 2)


def check_structure(data: bytes | bytearray) -> None:
    """Raise `InvalidRequest` if a file has so many parts that Pillow would take too long to read
    it.

    Malformed files pass, because Pillow reports their errors.
    """
    if data.startswith(_PNG):
        _check_png(data)
    elif data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data.startswith(_GIF):
        _check_gif(data)
    elif data.startswith(_BMP):
        _check_bmp(data)


def check_metadata(info: Mapping[Any, Any]) -> None:
    """Raise `InvalidRequest` if the EXIF metadata in `info`, as read by Pillow, is too large."""
    sizes = [
        len(info.get("exif") or b""),
        len(info.get("Raw profile type exif") or "") // 2,  # two hexadecimal digits per byte
    ]
    _check_count(max(sizes), MAX_EXIF_BYTES, "bytes of EXIF data")


def _check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(
            f"the image has at least {count} {what}, but at most {limit} are allowed"
        )


def _check_png(data: bytes | bytearray) -> None:
    offset, chunks, others = len(_PNG), 0, 0
    while offset + 8 <= len(data):
        chunks += 1
        others += data[offset + 4 : offset + 8] != b"IDAT"
        _check_count(chunks, MAX_CHUNKS, "chunks")
        _check_count(others, MAX_OTHER_CHUNKS, "chunks without pixels")
        offset += 12 + int.from_bytes(data[offset : offset + 4], "big")


def _check_jpeg(data: bytes | bytearray) -> None:
    # Within pixel data 0xFF is never followed by this byte, so a match is a marker or part of
    # metadata.
    _check_count(data.count(bytes((0xFF, _START_OF_SCAN))), MAX_SCANS, "scans")
    offset, segments = 2, 0
    while offset + 4 <= len(data) and data[offset + 1] != _START_OF_SCAN:
        segments += 1
        _check_count(segments, MAX_SEGMENTS, "segments")
        # Pillow skips fill bytes, and anything else that is not a marker, one byte at a time.
        is_marker = data[offset] == 0xFF and data[offset + 1] not in (0x00, 0xFF)
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big") if is_marker else 1


def _check_gif(data: bytes | bytearray) -> None:
    flags = data[10] if len(data) > 10 else 0
    offset, blocks = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0), 0
    while offset + 2 <= len(data) and data[offset] != _GIF_IMAGE:
        offset += 2 if data[offset] == _GIF_EXTENSION else 1
        blocks += 1
        if data[offset - 2] == _GIF_EXTENSION:
            while offset < len(data) and data[offset] and blocks <= MAX_GIF_BLOCKS:
                offset += 1 + data[offset]
                blocks += 1
        _check_count(blocks, MAX_GIF_BLOCKS, "blocks")


def _check_bmp(data: bytes | bytearray) -> None:
    if len(data) >= _BMP_COMPRESSION + 4:
        (compression,) = struct.unpack_from("<I", data, _BMP_COMPRESSION)
        if compression in _BMP_RLE:
            _check_count(len(data), MAX_RLE_BYTES, "bytes of run lengths")
