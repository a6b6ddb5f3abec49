"""Small files that take a long time to read are refused before Pillow reads them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from nanoactor.errors import InvalidRequest
from nanoactor.vision import structure
from nanoactor.vision.image_io import decode, read_header

MOST = 1 << 26


def chunk(kind, data):
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def png(before=(), pieces=1):
    """8 x 8 pixels, with these chunks before them, in so many pieces."""
    pixels = zlib.compress(b"".join(b"\0" + b"\x80" * 24 for _ in range(8)))
    parts = [pixels, *[b""] * (pieces - 1)]
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    body = [chunk(b"IHDR", head), *(chunk(kind, data) for kind, data in before)]
    body += [chunk(b"IDAT", part) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body) + chunk(b"IEND", b"")


def written(form, **options):
    image = Image.fromarray(np.full((8, 8, 3), 90, np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def exif(size):
    """One block whose entries all name most of it."""
    entries = min(5000, size // 12 - 2)
    head = b"II*\0" + struct.pack("<IH", 8, entries)
    each = (struct.pack("<HHII", 0x8000 + n, 7, size - 100, 8) for n in range(entries))
    data = head + b"".join(each) + struct.pack("<I", 0)
    return data + bytes(max(0, size - len(data)))


def jpeg(segments=0, fill=0):
    plain = written("JPEG")
    return plain[:2] + b"\xff\xfe\0\2" * segments + b"\xff" * fill + plain[2:]


def jpeg_of_scans(count):
    plain = written("JPEG", progressive=True)
    at = plain.rindex(b"\xff\xda")
    more = count - plain.count(b"\xff\xda")
    return plain[:-2] + plain[at:-2] * more + plain[-2:]


def gif(extensions=0, blocks=0):
    plain = written("GIF")
    palette = 3 << ((plain[10] & 7) + 1) if plain[10] & 0x80 else 0
    at = 13 + palette
    long = b"\x21\xfe" + b"\x01a" * blocks + b"\0" if blocks else b""
    return plain[:at] + b"\x21\xfe\x01a\0" * extensions + long + plain[at:]


def bmp_of_runs(rows):
    """Runs of two pixels."""
    info = struct.pack("<IiiHHIIiiII", 40, 4000, rows, 1, 8, 1, 0, 0, 0, 256, 0)
    info += b"\0\1\2\0" * 256
    data = (b"\x02\x05" * 2000 + b"\0\0") * rows
    head = struct.pack("<IHHI", 14 + len(info) + len(data), 0, 0, 14 + len(info))
    return b"BM" + head + info + data


TOO_MUCH = {
    "texts of a PNG": (png([(b"tEXt", b"k\0v")] * 2000), "chunks without pixels"),
    "pieces of a PNG": (png(pieces=20_000), "chunks"),
    "metadata of a PNG": (png([(b"eXIf", exif(100_000))]), "EXIF"),
    "segments of a JPEG": (jpeg(segments=2000), "segments"),
    "fill of a JPEG": (jpeg(fill=100_000), "segments"),
    "scans of a JPEG": (jpeg_of_scans(500), "scans"),
    "extensions of a GIF": (gif(extensions=5000), "blocks"),
    "blocks of a GIF": (gif(blocks=10_000), "blocks"),
    "runs of a BMP": (bmp_of_runs(600), "run lengths"),
}
ENOUGH = {
    "PNG": png(),
    "texts of a PNG": png([(b"tEXt", b"k\0v")] * 900),
    "pieces of a PNG": png(pieces=15_000),
    "metadata of a PNG": png([(b"eXIf", exif(60_000))]),
    "segments of a JPEG": jpeg(segments=900),
    "scans of a JPEG": jpeg_of_scans(90),
    "extensions of a GIF": gif(extensions=1000),
    "blocks of a GIF": gif(blocks=4000),
    "runs of a BMP": bmp_of_runs(20),
    "WebP": written("WEBP"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_file_of_too_many_parts_is_refused(name):
    data, word = TOO_MUCH[name]
    with pytest.raises(InvalidRequest, match=f"{word}.* at most .* are allowed"):
        read_header(data, MOST)
    with pytest.raises(InvalidRequest, match=word):
        decode(data, 28, 28)


@pytest.mark.parametrize("name", ENOUGH)
def test_a_file_within_the_bounds_is_read_as_before(name):
    data = ENOUGH[name]
    header = read_header(data, MOST)
    with Image.open(io.BytesIO(data)) as image:
        assert (header.width, header.height) == image.size
        right = np.asarray(image.convert("RGB").resize((28, 28), Image.Resampling.BICUBIC))
    assert (decode(data, 28, 28) == right).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_what_is_cut_short_is_left_to_pillow(kind):
    data = written(kind)
    for end in range(len(data)):
        structure.check_structure(data[:end])
