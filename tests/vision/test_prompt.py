"""Placeholders are expanded as transformers' processor does it, and equal ids of other images
never share a block."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoactor.errors import InvalidRequest
from nanoactor.kv.hashing import block_hash
from nanoactor.media.prompt import (
    VisualItem,
    block_extras,
    expand_prompt,
    items_message,
    patch_times,
)
from nanoactor.models.vision.config import parse_vision

SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
IMAGE, VIDEO, START, END = 1000, 1001, 1002, 1003
CONFIG = parse_vision(
    dict(
        vision_config={},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    ),
    "here",
)


def encode(text):
    """A token for each character, and for each special token."""
    parts = re.findall("|".join(map(re.escape, SPECIAL)) + "|.", text, re.DOTALL)
    return [1000 + SPECIAL.index(part) if part in SPECIAL else ord(part) for part in parts]


def image(key, height, width):
    return VisualItem(key.to_bytes(16, "little"), height, width)


def video(key, height, width, *times):
    return VisualItem(key.to_bytes(16, "little"), height, width, times)


def expand(text, *items):
    return expand_prompt(np.array(encode(text), np.int32), items, CONFIG, encode)


def processor(grids, frames_per_second=None, indices=()):
    """transformers' own, without the parts that need torchvision."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    made = object.__new__(Qwen3VLProcessor)
    made.image_token, made.video_token = SPECIAL[:2]
    made.vision_start_token, made.vision_end_token = SPECIAL[2:]
    made.image_processor = SimpleNamespace(merge_size=2)
    made.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    metadata = SimpleNamespace(fps=frames_per_second, frames_indices=list(indices))
    inputs = {"video_grid_thw": np.array(grids), "image_grid_thw": np.array(grids)}
    return made, {**inputs, "video_metadata": [metadata]}


def test_an_image_becomes_as_many_placeholders_as_it_has_rows():
    made, inputs = processor([(1, 4, 6)])
    expected = f"Look: {made.replace_image_token(inputs, 0)} nice?"
    found = expand("Look: <|image_pad|> nice?", image(7, 2, 3))
    assert found.token_ids.tolist() == encode(expected)


@pytest.mark.parametrize("fps", [1, 2, 29.97])
@pytest.mark.parametrize("indices", [[0, 1], [0, 7, 15], [3, 10, 11, 40]], ids=str)
def test_a_video_becomes_times_and_placeholders_as_in_transformers(fps, indices):
    patches = -(-len(indices) // 2)
    made, inputs = processor([(patches, 4, 2)], fps, indices)
    expected = f"See {made.replace_video_token(inputs, 0)}."
    times = patch_times([index / fps for index in indices], 2)
    assert times == tuple(made._calculate_timestamps(list(indices), fps, 2))
    found = expand("See <|video_pad|>.", video(1, 2, 1, *times))
    assert found.token_ids.tolist() == encode(expected)


ITEMS = st.lists(
    st.one_of(
        st.builds(image, st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)),
        st.builds(
            lambda key, height, width, times: video(key, height, width, *sorted(times)),
            st.integers(0, 3),
            st.integers(1, 3),
            st.integers(1, 3),
            st.lists(st.floats(0, 100), min_size=1, max_size=3),
        ),
    ),
    max_size=4,
)


def prompt_of(items, words):
    """Words between placeholders."""
    names = [SPECIAL[0 if item.times is None else 1] for item in items]
    return "".join(f"{word}{name}" for word, name in zip(words, names, strict=False)) + words[-1]


@given(ITEMS, st.lists(st.text("xyz", max_size=5), min_size=5, max_size=5))
def test_every_placeholder_is_a_row_of_its_item_in_order(items, words):
    found = expand(prompt_of(items, words), *items)
    rows = [[] for _ in items]
    covered = np.zeros(len(found.token_ids), np.bool_)
    for placed in found.spans:
        span, item = placed.span, items[placed.item]
        ids = found.token_ids[span.start : span.stop]
        assert (ids == (IMAGE if item.times is None else VIDEO)).all()
        covered[span.start : span.stop] = True
        rows[placed.item] += range(placed.first_row, placed.first_row + len(ids))
    assert rows == [[*range(item.tokens)] for item in items]
    assert (np.isin(found.token_ids, (IMAGE, VIDEO)) == covered).all()
    said = [chr(token) for token in found.token_ids.tolist() if chr(token) in "xyz"]
    assert "".join(said) == "".join([*words[: len(items)], words[-1]])


@pytest.mark.parametrize(
    ("text", "items", "message"),
    [
        (
            "<|image_pad|>",
            [],
            "1 image placeholders .token 1000., but the number of images given is 0",
        ),
        ("none", [image(1, 1, 1)], "0 image placeholders"),
        (
            "<|image_pad|>" * 3,
            [image(1, 1, 1)] * 2,
            "3 image placeholders .* but the number of images given is 2",
        ),
        ("<|video_pad|>", [image(1, 1, 1)], "0 image placeholders"),
        (
            "<|image_pad|>",
            [video(1, 1, 1, 0.0)],
            "1 image placeholders .* but the number of images given is 0",
        ),
    ],
)
def test_a_placeholder_too_many_or_too_few_is_refused(text, items, message):
    with pytest.raises(InvalidRequest, match=message):
        expand(text, *items)


def test_images_and_videos_are_placed_by_their_kind():
    items = [image(1, 1, 1), image(2, 1, 2), video(3, 1, 3, 0.0)]
    found = expand("<|image_pad|>a<|video_pad|>b<|image_pad|>", *items)
    assert [placed.item for placed in found.spans] == [0, 2, 1]
    assert [placed.span.width for placed in found.spans] == [1, 3, 2]


# -- names of blocks ----------------------------------------------------------------------

SIZE = 4


def names(found, items):
    """The chained names of all full blocks."""
    message = items_message(found, items, CONFIG, 0)
    extras, parent, named = block_extras(message, SIZE), b"", []
    for start in range(0, len(found.token_ids) - SIZE + 1, SIZE):
        tokens = found.token_ids[start : start + SIZE]
        parent = block_hash(parent, tokens, b"k" * 16, extras.get(start // SIZE, b""))
        named.append(parent)
    return named


@given(ITEMS, ITEMS, st.lists(st.text("xyz", max_size=5), min_size=5, max_size=5))
@example([video(1, 1, 1, 0.0)] * 2, [video(1, 1, 1, 0.0, 0.0)], [""] * 5)
def test_blocks_share_a_name_only_where_all_up_to_there_is_equal(one, other, words):
    """Equal means: the same ids, and the same rows of the same items in the same shape."""
    meanings, named = [], []
    for items in (one, other):
        found = expand(prompt_of(items, words), *items)
        meaning = [(token, None) for token in found.token_ids.tolist()]
        for placed in found.spans:
            item = items[placed.item]
            for number in range(placed.span.stop - placed.span.start):
                row = (item.key, item.height, item.width, placed.first_row + number)
                meaning[placed.span.start + number] = (None, row)
        meanings.append(meaning)
        named.append(names(found, items))
    for block, (mine, theirs) in enumerate(zip(*named, strict=False)):
        end = (block + 1) * SIZE
        assert (mine == theirs) == (meanings[0][:end] == meanings[1][:end])


def test_blocks_without_images_keep_the_names_of_text():
    found = expand("eight characters " + "<|image_pad|>" + "tail", image(1, 1, 2))
    assert set(block_extras(items_message(found, [image(1, 1, 2)], CONFIG, 0), SIZE)) == {4}


def test_a_block_of_two_images_names_both():
    items = [image(1, 1, 2), image(2, 1, 1)]
    found = expand("<|image_pad|>a<|image_pad|>", *items)
    assert [placed.item for placed in found.spans] == [0, 1]
    swapped = [image(1, 1, 2), image(3, 1, 1)]
    assert names(found, items) != names(found, swapped)
