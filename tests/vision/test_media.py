"""What users give becomes bytes with a name; the name covers whatever changes the pixels."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nanoactor.errors import InvalidRequest
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.vision.media import MediaReader
from nanoactor.vision.rules import MediaRules, decode_data_url

IMAGES = ImageConfig(4096, 65536, 32, rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3)
RULES = MediaRules(IMAGES, 1_000_000)
READER = MediaReader(IMAGES, b"s" * 16, 1_000_000)
ARRAY = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)


def encoded(form="PNG"):
    out = io.BytesIO()
    Image.fromarray(ARRAY).save(out, form)
    return out.getvalue()


def test_every_way_to_give_an_image_gives_its_pixels(tmp_path):
    data = encoded()
    path = tmp_path / "x.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    image = Image.fromarray(ARRAY)
    area = RULES.area({})
    ways = [data, bytearray(data), path, str(path), url, image, image.convert("RGBA"), ARRAY]
    found = [READER.decode(RULES.read_image(way, area)) for way in ways]
    assert found[0].shape == (1, 64, 96, 3)
    assert all(np.array_equal(found[0], other) for other in found)
    grey = READER.decode(RULES.read_image(ARRAY[:, :, 0], area))
    assert (grey[..., 0] == grey[..., 2]).all()


def test_names_differ_where_pixels_may():
    """By content, by form, by shape and by the size that they are resized to."""
    plain = RULES.area({})
    other = ARRAY.copy()
    other[3, 4, 1] ^= 1
    ways = [
        (encoded(), plain),
        (encoded("BMP"), plain),
        (ARRAY, plain),
        (other, plain),
        (ARRAY.reshape(90, 70, 3), plain),
        (ARRAY, RULES.area({"max_pixels": 4096})),
        (ARRAY, RULES.area({"size": {"shortest_edge": 20000}})),
    ]
    keys = [READER.read(RULES.read_image(*way)).key for way in ways]
    assert len(set(keys)) == len(keys)
    assert READER.read(RULES.read_image(encoded(), plain)).key == keys[0]
    other_salt = MediaReader(IMAGES, b"t" * 16, 1_000_000)
    assert other_salt.read(RULES.read_image(*ways[0])).key != keys[0]


def test_low_detail_bounds_the_area():
    assert RULES.area({}, "low") == RULES.area({}) == (4096, 65536)
    large = MediaRules(ImageConfig(4096, 1 << 24, 32, 1 / 255, (0.5,) * 3, (0.5,) * 3), 1)
    assert large.area({}, "low") == (4096, 512 * 512)


@pytest.mark.parametrize(
    ("kwargs", "detail", "message"),
    [
        ({"fps": 2}, "auto", "'fps' is not a known key"),
        ({"max_pixels": 0}, "auto", "max_pixels must be an integer"),
        ({"min_pixels": True}, "auto", "min_pixels must be an integer"),
        ({"size": 3}, "auto", "size must be a dict"),
        ({"max_pixels": 1 << 20}, "auto", "exceeds the model's own limit"),
        ({"max_pixels": 100}, "auto", "max_pixels must be at least min_pixels"),
        ({}, "finest", "detail must be"),
    ],
)
def test_settings_that_cannot_be_are_named(kwargs, detail, message):
    with pytest.raises(InvalidRequest, match=message):
        RULES.area(kwargs, detail)


@given(st.binary(max_size=40))
def test_no_bytes_do_anything_but_be_refused(data):
    if data:
        with pytest.raises(InvalidRequest):
            READER.read(RULES.read_image(data, RULES.area({})))


@pytest.mark.parametrize("url", ["data:,x", "data:image/png,x", "data:image/png;base64,x", "data:"])
def test_only_data_urls_of_images_in_base64_are_read(url):
    with pytest.raises(InvalidRequest):
        decode_data_url(url)
