"""The decoder sees images as transformers does, wherever a prompt is cut, and next to others."""

import random

import pytest
import torch

from nanoactor.models.config import read_config
from nanoactor.models.devices import open_device
from nanoactor.models.vision.mrope import VisualSpan, rope_positions
from nanoactor.models.vision.tower import Grid, VisionTower
from nanoactor.models.weights.checkpoint import CheckpointWeights
from tests.models.checkpoints import TOWERS, VISION_IDS, make_checkpoint
from tests.models.test_decoder import Driver, Sequence, assert_close, random_tokens, reference

IMAGE, VIDEO, START, END = VISION_IDS.values()
# (kind, temporal patches, height and width in tokens), with a few tokens of text between them.
ITEMS = {
    "a_image": [(IMAGE, 1, 2, 3)],
    "at_the_start_and_alone": [(IMAGE, 1, 4, 1)],
    "two_images": [(IMAGE, 1, 1, 1), (IMAGE, 1, 3, 2)],
    "a_video": [(VIDEO, 3, 2, 2)],
    "mixed": [(VIDEO, 2, 1, 2), (IMAGE, 1, 3, 1), (VIDEO, 1, 2, 2), (IMAGE, 1, 1, 4)],
}
DECODERS = {
    "": dict(),
    "tied": dict(tie_word_embeddings=True),
    "gqa": dict(num_attention_heads=10, num_key_value_heads=2, head_dim=16),
    "yarn": dict(
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=128,
            mrope_section=[4, 5, 3],
        )
    ),
}
KINDS = [*((tower, "") for tower in TOWERS), *(("two_levels", kind) for kind in DECODERS if kind)]


class Eyes:
    """A checkpoint, its tower and transformers' model of it."""

    def __init__(self, directory, tower, decoder):
        self.directory = directory
        self.model = make_checkpoint(
            directory,
            family="Qwen3VL",
            tower=TOWERS[tower],
            num_hidden_layers=4,
            **DECODERS[decoder],
        )
        self.config = read_config(directory).vision
        device = open_device("cpu")
        with CheckpointWeights(directory, torch.float32, device.torch_device) as weights:
            self.tower = VisionTower(self.config, weights, device, "model.visual")

    def sequence(self, items, seed=0):
        """A prompt with these items, and the logits that transformers gives for it."""
        text = random_tokens(200, seed).clamp(max=200).tolist()
        rng, m = random.Random(seed), self.config.merge_size
        tokens, spans, grids = [], [], []
        for kind, frames, height, width in items:
            tokens += [text.pop() for _ in range(rng.randrange(4))]
            grids.append(Grid(frames, m * height, m * width))
            for _ in range(frames):
                tokens += [text.pop()] * (kind == VIDEO) + [START]
                spans.append(VisualSpan(len(tokens), height, width))
                tokens += [kind] * (height * width) + [END]
        tokens += [text.pop() for _ in range(6)]
        tokens = torch.tensor(tokens)
        patches = [
            torch.randn(g.patches, self.config.patch_values, generator=torch.manual_seed(seed + i))
            for i, g in enumerate(grids)
        ]
        with torch.inference_mode():
            features = self.tower(torch.cat(patches), grids)
        positions, _ = rope_positions(len(tokens), spans)
        visual = (tokens == IMAGE) | (tokens == VIDEO)
        made = Sequence(tokens, torch.from_numpy(positions).long(), features.clone(), visual)
        return made, self._logits(tokens, [kind for kind, *_ in items], patches, grids)

    def _logits(self, tokens, kinds, patches, grids):
        given = {}
        for kind, pixels, sizes in (
            (IMAGE, "pixel_values", "image_grid_thw"),
            (VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            mine = [i for i, found in enumerate(kinds) if found == kind]
            if mine:
                given[pixels] = torch.cat([patches[i] for i in mine])
                shapes = [(grids[i].frames, grids[i].height, grids[i].width) for i in mine]
                given[sizes] = torch.tensor(shapes)
        types = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        with torch.inference_mode():
            return self.model(tokens[None], mm_token_type_ids=types[None], **given).logits[0]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def eyes(request, tmp_path_factory):
    return Eyes(tmp_path_factory.mktemp("vision"), *request.param)


@pytest.mark.parametrize("items", ITEMS)
def test_a_whole_prompt_gives_the_logits_of_transformers(eyes, items):
    sequence, expected = eyes.sequence(ITEMS[items])
    Driver(eyes.directory).step([(sequence, sequence.left)])
    assert_close(sequence.result(), expected)


@pytest.mark.parametrize("items", ["two_images", "mixed"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_of_every_size_give_the_logits_of_transformers(eyes, items, chunk):
    """Cut before, in and behind images; the last tokens are decoded behind the delta."""
    sequence, expected = eyes.sequence(ITEMS[items], seed=chunk)
    driver = Driver(eyes.directory)
    while sequence.left > 2:
        driver.step([(sequence, min(chunk, sequence.left - 2))])
    driver.step([], [sequence])
    driver.step([], [sequence])
    assert_close(sequence.result(), expected)


def test_a_step_of_images_text_and_decode_rows_gives_each_its_own(eyes):
    driver = Driver(eyes.directory)
    pairs = [eyes.sequence(ITEMS[name], seed) for seed, name in enumerate(ITEMS)]
    text = random_tokens(20, 9).clamp(max=200)
    pairs.append((Sequence(text), reference(eyes.model, text)))
    decoding = pairs[0][0]
    driver.step([(decoding, decoding.left - 3)])
    for number in range(3):
        rest = [sequence for sequence, _ in pairs[1:]]
        cut = [(s, s.left if number == 2 else s.left // 2) for s in rest]
        driver.step(cut, [decoding])
    for sequence, expected in pairs:
        assert_close(sequence.result(), expected)


def test_text_is_the_same_bit_for_bit_with_and_without_three_positions(eyes):
    tokens = random_tokens(20, 3).clamp(max=200)
    plain, tripled = Sequence(tokens), Sequence(tokens)
    tripled.positions = torch.arange(20).expand(3, -1)
    tripled.visual = torch.zeros(20, dtype=torch.bool)
    tripled.features = torch.empty(0, eyes.config.feature_size)
    for sequence in (plain, tripled):
        Driver(eyes.directory).step([(sequence, 20)])
    assert torch.equal(plain.result(), tripled.result())


@pytest.mark.parametrize("broken", ["level", "sides", "images"])
def test_such_faults_would_show(tmp_path, broken):
    """Levels of no effect, height for width, one image for the other: logits tell them all."""
    eyes = Eyes(tmp_path, "two_levels", "")
    sequence, expected = eyes.sequence(ITEMS["two_images"])
    size = eyes.config.out_hidden_size
    if broken == "level":
        sequence.features[:, size:] = 0
    elif broken == "sides":
        sequence.positions = sequence.positions[[0, 2, 1]]
    else:
        sequence.features = sequence.features.roll(1, 0)
    Driver(eyes.directory).step([(sequence, sequence.left)])
    with pytest.raises(AssertionError):
        assert_close(sequence.result(), expected)
