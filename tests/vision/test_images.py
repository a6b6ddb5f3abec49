"""Images of every kind have the pixels that transformers gives them, or are refused."""

import base64
import contextlib
import functools
import io
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from nanoactor.errors import InvalidRequest
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.vision import image_io
from nanoactor.vision.image_io import Header, decode, read_header, resize_image, upright
from nanoactor.vision.rules import MediaRules

MOST = 1 << 22
SIZE = (37, 53)


def noise(mode, size=SIZE, seed=0):
    width, height = size
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(colours, "RGBA")
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (height, width), np.uint16))
    return image.convert("RGB").convert(mode) if mode in ("P", "CMYK") else image.convert(mode)


def chunk(kind, body):
    """Of a PNG."""
    whole = kind + body
    return len(body).to_bytes(4, "big") + whole + zlib.crc32(whole).to_bytes(4, "big")


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def theirs(data, height, width):
    """By transformers: load the image, then resize it with the processor's NumPy backend."""
    from transformers.image_transforms import resize
    from transformers.image_utils import ChannelDimension, load_image

    image = load_image("data:image/png;base64," + base64.b64encode(data).decode())
    channels_first = np.moveaxis(np.array(image), -1, 0)
    return resize(
        channels_first,
        (height, width),
        Image.Resampling.BICUBIC,
        data_format=ChannelDimension.LAST,
        input_data_format=ChannelDimension.FIRST,
    )


ENCODINGS = [
    *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
    *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("GIF", mode) for mode in ("P", "L")),
    ("BMP", "RGB"),
]


@pytest.mark.parametrize(("kind", "mode"), ENCODINGS)
@pytest.mark.parametrize("to", [(32, 64), (96, 64)], ids=str)
def test_pixels_are_those_of_transformers(kind, mode, to):
    data = encoded(noise(mode), kind)
    assert read_header(data, MOST) == Header(53, 37)
    found = decode(data, *to)
    assert found.shape == (*to, 3)
    assert found.dtype == np.uint8
    assert (found == theirs(on_white(data), *to)).all()


def on_white(data):
    """An image without what transformers drops and Qwen's own loader does not: transparency, which
    has a white ground, and the high bits of grey, which transformers cuts off."""
    image = Image.open(io.BytesIO(data))
    if image.mode == "I;16":
        return encoded(Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)), "PNG")
    if not image.has_transparency_data:
        return data
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image.convert("RGBA"))
    return encoded(ground.convert("RGB"), "PNG")


def properties():
    """Files with each property that an image's file can have, by name."""
    drawn = Image.new("RGBA", (64, 32), (0, 0, 0, 0))
    drawn.paste((0, 0, 0, 255), (5, 5, 20, 12))
    drawn.paste((200, 30, 60, 128), (30, 10, 60, 28))
    grey, solid = drawn.convert("LA"), drawn.convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = drawn.convert("RGB").quantize(16)
    steps = np.linspace(0, 65535, 64 * 32).reshape(32, 64).astype(np.uint16)
    frames = [solid.rotate(angle) for angle in (0, 90, 180)]
    later = dict(save_all=True, append_images=frames[1:])
    return {
        "RGBA PNG": encoded(drawn, "PNG"),
        "LA PNG": encoded(grey, "PNG"),
        "P PNG with tRNS": encoded(palette, "PNG", transparency=0),
        "P PNG with alphas": encoded(palette, "PNG", transparency=bytes(range(0, 160, 10))),
        "RGB PNG with tRNS": encoded(solid, "PNG", transparency=(0, 0, 0)),
        "RGBA WEBP": encoded(drawn, "WEBP", lossless=True),
        "GIF with a clear colour": encoded(palette, "GIF", transparency=0),
        "GIF of several frames": encoded(frames[0], "GIF", **later),
        "WEBP of several frames": encoded(frames[0], "WEBP", **later),
        "PNG of several frames": encoded(frames[0], "PNG", **later),
        "turned JPEG": encoded(solid, "JPEG", exif=exif),
        "turned PNG": encoded(drawn, "PNG", exif=exif),
        "turned WEBP": encoded(drawn, "WEBP", exif=exif),
        "CMYK JPEG": encoded(solid.convert("CMYK"), "JPEG"),
        "grey JPEG": encoded(solid.convert("L"), "JPEG"),
        "grey PNG of 16 bits": encoded(Image.fromarray(steps), "PNG"),
        "PNG of 1 bit": encoded(solid.convert("1"), "PNG"),
        "JPEG with a profile": encoded(solid, "JPEG", icc_profile=b"no profile at all"),
        "BMP": encoded(solid, "BMP"),
    }


@pytest.mark.parametrize("name", properties())
def test_an_image_is_the_same_whichever_way_it_comes(tmp_path, name):
    """As bytes, as a path, as a `data:` URL, and opened by Pillow."""
    data = properties()[name]
    path = tmp_path / "image"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    rules = MediaRules(ImageConfig(1 << 10, 1 << 20, 32, 1 / 255, (0.5,) * 3, (0.5,) * 3), MOST)
    found = []
    with Image.open(path) as opened:
        for given in (data, path, str(path), url, opened):
            media = rules.read_image(given, (1 << 10, 1 << 20))
            if media.form:
                image = Image.frombytes(media.form, media.shape[::-1], media.data)
                found.append(resize_image(image, 32, 32))
            else:
                found.append(decode(media.data, 32, 32))
    assert all((one == found[0]).all() for one in found[1:])
    assert 0 < found[0].mean() < 255, "nothing is drawn on its own colour"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused(mode):
    image = Image.new(mode, (8, 8))
    with pytest.raises(InvalidRequest, match=f"mode {mode}"):
        upright(image)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_metadata_says(kind, orientation):
    image = noise("RGB")
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    upright = Header(37, 53) if orientation >= 5 else Header(53, 37)
    assert read_header(data, MOST) == upright
    assert (decode(data, 64, 32) == theirs(data, 64, 32)).all()


@pytest.mark.parametrize("after", [False, True])
def test_orientations_of_a_png_are_found_wherever_they_stand(after):
    """Editors write XMP, and some write EXIF behind the pixels."""
    chunks = PngInfo()
    if not after:
        chunks.add_itxt("XML:com.adobe.xmp", '<rdf tiff:Orientation="8"/>')
    data = encoded(noise("RGB"), "PNG", pnginfo=chunks)
    if after:
        exif = Image.Exif()
        exif[0x0112] = 6
        end = data.index(b"IEND") - 4
        data = data[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + data[end:]
    assert read_header(data, MOST) == Header(37, 53)
    assert (decode(data, 64, 32) == theirs(data, 64, 32)).all()


def test_of_a_moving_image_the_first_frame_counts():
    frames = [noise("RGB", seed=seed) for seed in range(3)]
    for kind in ("GIF", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert (decode(data, 32, 32) == theirs(data, 32, 32)).all()


def test_one_pixel_is_an_image():
    data = encoded(noise("RGB", (1, 1)), "PNG")
    assert read_header(data, MOST) == Header(1, 1)
    assert len(np.unique(decode(data, 32, 32).reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L"])
def test_opened_images_become_white_where_they_are_transparent(mode):
    image = noise(mode)
    white = Image.new("RGBA", image.size, "white")
    expected = np.asarray(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))
    assert (resize_image(image, 53, 37) == expected).all()


# -- what is refused ----------------------------------------------------------------------


def forbid_decoding(monkeypatch):
    def load(self):
        raise AssertionError("it is decoded")

    for name in ("PngImagePlugin.PngImageFile", "JpegImagePlugin.JpegImageFile"):
        module, _, kind = name.partition(".")
        plugin = getattr(__import__(f"PIL.{module}"), module)
        monkeypatch.setattr(getattr(plugin, kind), "load", load)


def with_text():
    """As many programs write it."""
    chunks = PngInfo()
    chunks.add_text("Software", "a camera")
    chunks.add_itxt("Comment", "XML:com.adobe.xmp stands here, and is no keyword")
    return dict(pnginfo=chunks)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_sizes_are_read_without_decoding(monkeypatch, kind):
    data = encoded(noise("RGB"), kind, **(with_text() if kind == "PNG" else {}))
    forbid_decoding(monkeypatch)
    assert read_header(data, MOST) == Header(53, 37)
    with pytest.raises(InvalidRequest, match="37 x 53 pixels, but at most 1000 are allowed"):
        read_header(data, 1000)


def bomb(width, height):
    """A PNG of some kilobytes that would be gigabytes."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 30_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_unread(monkeypatch, side):
    forbid_decoding(monkeypatch)
    with pytest.raises(InvalidRequest, match=r"but at most|cannot be decoded"):
        read_header(bomb(side, side), 1 << 26)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98])
def test_a_file_that_is_cut_off_is_refused(kind, share):
    data = encoded(noise("RGB", (200, 200)), kind)
    with pytest.raises(InvalidRequest, match=r"not in a supported format|cannot be decoded"):
        decode(data[: int(share * len(data))], 32, 32)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", b"%PDF-1.7", b"<svg/>", bytes(5000)])
def test_what_is_no_image_is_refused_with_the_known_formats(data):
    with pytest.raises(InvalidRequest, match=r"not in a supported format; .* are JPEG, PNG"):
        read_header(data, MOST)


def test_formats_that_are_not_known_are_refused():
    for kind in ("TIFF", "PPM", "ICO"):
        with pytest.raises(InvalidRequest, match="not in a supported format"):
            read_header(encoded(noise("RGB"), kind), MOST)


@functools.cache
def undamaged(kind):
    return encoded(noise("RGB"), kind)


@settings(max_examples=300)
@given(st.sampled_from(image_io.FORMATS), st.integers(0, 2**32), st.integers(1, 20))
def test_damaged_files_give_pixels_or_the_one_error(kind, seed, changes):
    data = bytearray(undamaged(kind))
    rng = np.random.default_rng(seed)
    for at in rng.integers(0, len(data), changes):
        data[at] = rng.integers(0, 256)
    # As in an engine, nothing is decoded whose header says that it is too large.
    with contextlib.suppress(InvalidRequest):
        read_header(bytes(data), 1 << 16)
        decode(bytes(data), 32, 32)
