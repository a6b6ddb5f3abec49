"""The vision tower, its positions and its pixels are those of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.models.config import parse_config, read_config
from nanoactor.models.devices import open_device
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.vision.config import parse_vision
from nanoactor.models.vision.image_config import parse_image_config, read_image_config
from nanoactor.models.vision.mrope import VisualSpan, rope_positions
from nanoactor.models.vision.patches import PatchMaker
from nanoactor.models.vision.tower import Grid, VisionTower
from nanoactor.models.weights.checkpoint import CheckpointWeights
from tests.models.checkpoints import TOWERS, VISION_IDS, make_checkpoint

TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=TOWERS)
def made(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(
        directory, family="Qwen3VL", tower=TOWERS[request.param], num_hidden_layers=4
    )
    return directory, model


def open_tower(directory):
    config, device = read_config(directory).vision, open_device("cpu")
    with CheckpointWeights(directory, torch.float32, device.torch_device) as weights:
        return VisionTower(config, weights, device, "model.visual")


def theirs(model, patches, grids):
    """(tokens, feature_size) by transformers."""
    sizes = torch.tensor([(g.frames, g.height, g.width) for g in grids])
    with torch.inference_mode():
        out = model.model.visual(patches, grid_thw=sizes)
    return torch.cat((out.pooler_output, *out.deepstack_features), dim=1)


def rows(config, grids, seed=0):
    count = sum(grid.patches for grid in grids)
    return torch.randn(count, config.patch_values, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1, 1)],
        [(1, 1, 7)],
        [(1, 5, 1)],
        [(1, 3, 4)],
        [(4, 2, 3)],
        [(1, 3, 4), (1, 3, 4), (1, 2, 2)],
        [(2, 1, 3), (1, 6, 3), (3, 2, 2)],
    ],
    ids=str,
)
def test_images_and_videos_give_the_features_of_transformers(made, sizes):
    directory, model = made
    tower, config = open_tower(directory), read_config(directory).vision
    m = config.merge_size
    grids = [Grid(frames, m * height, m * width) for frames, height, width in sizes]
    patches = rows(config, grids)
    with torch.inference_mode():
        found = tower(patches, grids)
    expected = theirs(model, patches, grids)
    assert found.shape == (sum(g.patches for g in grids) // m**2, config.feature_size)
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_an_item_gives_the_same_alone_as_with_others(made):
    directory, _ = made
    tower, config = open_tower(directory), read_config(directory).vision
    m = config.merge_size
    grids = [Grid(1, 2 * m, 3 * m), Grid(2, m, 2 * m), Grid(1, 2 * m, 3 * m)]
    patches = rows(config, grids)
    with torch.inference_mode():
        together = tower(patches, grids)
        parts = patches.split([grid.patches for grid in grids])
        alone = torch.cat([tower(p, [g]) for p, g in zip(parts, grids, strict=True)])
    assert (together - alone).abs().max() < TOLERANCE * alone.abs().max()


# -- positions ----------------------------------------------------------------------------


def test_positions_of_an_image_are_those_that_are_known():
    positions, delta = rope_positions(12, [VisualSpan(3, 2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]
    assert delta == -3


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.booleans()),
        max_size=5,
    ),
    st.integers(0, 4),
)
def test_positions_are_those_of_transformers(items, tail):
    """Text of some length, then an image or a frame of a video, over and over, and text."""
    model = small_model()
    kinds, spans, grids = [], [], {1: [], 2: []}
    for text, height, width, is_video in items:
        kinds += [0] * text
        spans.append(VisualSpan(len(kinds), height, width))
        kinds += [1 + is_video] * (height * width)
        grids[1 + is_video].append((1, 2 * height, 2 * width))
    kinds += [0] * (tail + (not kinds))
    images, videos = (torch.tensor(grids[k]) if grids[k] else None for k in (1, 2))
    expected, delta = model.model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.int64), torch.tensor([kinds]), images, videos
    )
    found, own_delta = rope_positions(len(kinds), spans)
    assert found.tolist() == expected[:, 0].tolist()
    assert own_delta == int(delta)


def small_model(made=[]):  # noqa: B006
    """One for all examples."""
    if not made:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        with torch.device("meta"):
            made.append(Qwen3VLForConditionalGeneration(Qwen3VLConfig()))
    return made[0]


@pytest.mark.parametrize("spans", [[(3, 2, 3), (8, 1, 1)], [(5, 2, 2)]], ids=str)
def test_spans_that_overlap_or_leave_the_prompt_are_refused(spans):
    with pytest.raises(ValueError, match="begins before .*, or extends past the end"):
        rope_positions(8, [VisualSpan(*span) for span in spans])


# -- configurations -----------------------------------------------------------------------


def raw_config(tmp_path, **config):
    make_checkpoint(tmp_path, family="Qwen3VL", **config)
    return json.loads((tmp_path / "config.json").read_text())


def test_both_spellings_of_the_rotary_configuration_are_read(tmp_path):
    raw = raw_config(tmp_path)
    expected = parse_config(raw)
    text = raw["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {**rope, "mrope_interleaved": True}
    assert parse_config(raw) == expected
    assert expected.rope.sections == (6, 3, 3)
    assert expected.rope.theta == 5e4
    assert expected.vision.image_token_id == VISION_IDS["image_token_id"]


@pytest.mark.parametrize("tied", [False, True])
def test_whether_weights_are_tied_is_said_of_the_whole_model(tmp_path, tied):
    raw = raw_config(tmp_path, tie_word_embeddings=tied)
    raw["text_config"]["tie_word_embeddings"] = not tied
    assert parse_config(raw).tie_embeddings is tied


def test_what_the_file_leaves_out_is_as_in_transformers(tmp_path):
    from transformers import AutoConfig

    raw = raw_config(tmp_path)
    del raw["text_config"]["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters["rope_theta"]
    assert parse_config(raw).rope.theta == theirs == 5e5


@pytest.mark.parametrize("written", ["missing", None, []])
def test_a_tower_has_no_deepstack_unless_its_configuration_says_so(tmp_path, written):
    raw = raw_config(tmp_path)
    section = {k: v for k, v in raw["vision_config"].items() if k != "deepstack_visual_indexes"}
    if written != "missing":
        section["deepstack_visual_indexes"] = written
    found = parse_config(raw | {"vision_config": section}).vision
    assert found.deepstack_layers == ()
    assert found.feature_size == section["out_hidden_size"]


def test_ids_outside_of_the_vocabulary_are_refused(tmp_path):
    raw = raw_config(tmp_path) | {"video_token_id": 215}
    with pytest.raises(ModelError, match="must be less than vocab_size 215"):
        parse_config(raw)


WRONG = [
    ("vision_config", None, ModelError, "vision_config must be an object"),
    ("text_config", [], ModelError, "text_config must be an object"),
    ("hidden_act", "relu", UnsupportedModel, "hidden_act is 'relu'"),
    ("depth", 0, ModelError, "vision_config: depth must be a positive"),
    ("num_position_embeddings", 24, ModelError, "must be a square number"),
    ("num_heads", 5, ModelError, "hidden_size 32 must be a multiple of 4 . num_heads"),
    ("deepstack_visual_indexes", [3], ModelError, "distinct integers from 0 to 2"),
    ("deepstack_visual_indexes", [1, 1], ModelError, "distinct integers"),
    ("deepstack_visual_indexes", "all", ModelError, "distinct integers"),
    (
        "deepstack_visual_indexes",
        [0, 1, 2],
        ModelError,
        "has 3 entries, but the decoder has only 2",
    ),
    (
        "out_hidden_size",
        32,
        ModelError,
        "out_hidden_size 32 must be equal to the decoder's hidden_size 64",
    ),
    ("rope_parameters", {"rope_type": "yarn"}, UnsupportedModel, "only supported rope_type is"),
    ("rope_parameters", {"rope_theta": 0}, ModelError, "rope_theta must be greater than 0"),
]


@pytest.mark.parametrize(("key", "value", "kind", "message"), WRONG)
def test_wrong_configurations_are_refused_by_name(tmp_path, key, value, kind, message):
    raw = raw_config(tmp_path)
    place = raw if key.endswith("_config") else raw["vision_config"]
    place[key] = value
    with pytest.raises(kind, match=message):
        parse_config(raw)


@pytest.mark.parametrize("value", [[1, 2], [1, 2, -3], "THW", [1.0, 2, 3]])
def test_wrong_sections_are_refused(tmp_path, value):
    raw = raw_config(tmp_path)
    raw["text_config"]["rope_parameters"]["mrope_section"] = value
    with pytest.raises(ModelError, match="mrope_section must be three integers"):
        parse_config(raw)


# -- pixels -------------------------------------------------------------------------------

PROCESSOR = dict(
    size={"shortest_edge": 4096, "longest_edge": 16384},
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.5, 0.4, 0.3],
    image_std=[0.5, 0.25, 0.125],
)


def vision_config():
    from transformers import Qwen3VLConfig

    raw = json.loads(Qwen3VLConfig().to_json_string(use_diff=False))
    raw["vision_config"].update(patch_size=4, out_hidden_size=4096)
    return parse_vision(raw, "here")


def processor(**changes):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**{**PROCESSOR, **changes})


def image_config(**changes):
    return parse_image_config({**PROCESSOR, **changes}, vision_config())


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(4096, 16384), (64, 10**6)]))
def test_images_are_resized_to_the_sizes_of_transformers(height, width, areas):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size = dict(shortest_edge=areas[0], longest_edge=areas[1])
    config = image_config(size=size)
    try:
        expected = smart_resize(height, width, config.factor, *areas)
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            config.fit(height, width)
    else:
        assert config.fit(height, width) == expected


@pytest.mark.parametrize("size", [(64, 64), (64, 128), (200, 16), (72, 88)], ids=str)
def test_patches_of_an_image_are_those_of_transformers_bit_for_bit(size):
    height, width = image_config().fit(*size)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    theirs = processor()([pixels], return_tensors="pt", do_resize=False)
    patches, grid = PatchMaker(vision_config(), image_config(), torch.device("cpu"))(
        torch.from_numpy(pixels)[None]
    )
    assert [[grid.frames, grid.height, grid.width]] == theirs["image_grid_thw"].tolist()
    assert torch.equal(patches, theirs["pixel_values"])


def test_a_video_is_cut_into_pairs_of_frames_and_the_last_is_repeated():
    """Each pair of frames has the rows of two images, one frame's from each."""
    frames = torch.randint(0, 256, (5, 64, 72, 3), dtype=torch.uint8)
    maker = PatchMaker(vision_config(), image_config(), torch.device("cpu"))
    patches, grid = maker(frames)
    assert grid == Grid(3, 16, 18)
    views = patches.view(3, 16 * 18, 3, 2, 16)
    for index in range(6):
        alone, _ = maker(frames[min(index, 4)][None])
        expected = alone.view(16 * 18, 3, 2, 16)[:, :, 0]
        assert torch.equal(views[index // 2][:, :, index % 2], expected)


@pytest.mark.parametrize("nested", [False, True])
def test_the_processors_own_file_is_read(tmp_path, nested):
    made = json.loads(processor().to_json_string())
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": made} if nested else made))
    assert read_image_config(tmp_path, vision_config()) == image_config()


def test_without_a_file_the_error_says_which():
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        read_image_config(Path("/nonexistent"), vision_config())


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (dict(size=None), ModelError, "shortest_edge must be a positive"),
        (dict(size=[1]), ModelError, "size must be an object"),
        (dict(max_pixels=2), ModelError, "4096 pixels, exceeds the maximum area, 2 pixels"),
        (dict(image_mean=None), ModelError, "image_mean must be a list of 3 numbers"),
        (dict(image_std=[1.0, 0.0, 1.0]), ModelError, "image_std must not contain 0"),
        (dict(image_std=[1.0, float("nan"), 1.0]), ModelError, "image_std must be a finite"),
        (dict(patch_size=14), ModelError, "patch_size is 14, but the vision tower requires 4"),
        (dict(resample=2), UnsupportedModel, "only 3"),
        (dict(do_normalize=False), UnsupportedModel, "do_normalize must be true"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_processors_are_refused_by_name(changes, kind, message):
    with pytest.raises(kind, match=message):
        image_config(**changes)
