"""All families compute what transformers computes, however prompts are cut, batched and cached."""

import dataclasses
import json
import random

import pytest
import torch

from nanoactor.models.batch import FinalRows, ForwardInputs, KVCache, VisualTokens
from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.layers.rope import RotaryEmbedding
from nanoactor.models.model_config import RopeConfig
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.weights import format_of
from tests.models.batches import attention_batch
from tests.models.checkpoints import ALONE, SMALL, make_checkpoint

TOLERANCE = 2e-4
LENGTH = 45


@dataclasses.dataclass(eq=False)
class Sequence:
    """Tokens that are all known: the driver only chooses how they are fed."""

    tokens: torch.Tensor
    positions: torch.Tensor | None = None
    """(3, tokens), where some are of images; ..."""
    features: torch.Tensor | None = None
    """... what the tower has made of them, ..."""
    visual: torch.Tensor | None = None
    """... and which they are, (tokens,)."""
    blocks: list = dataclasses.field(default_factory=list)
    done: int = 0
    logits: list = dataclasses.field(default_factory=list)

    @property
    def left(self):
        return len(self.tokens) - self.done

    def result(self):
        assert not self.left
        return torch.cat(self.logits)


class Driver:
    """A model with a paged cache; blocks come in random order and hold garbage at first."""

    def __init__(self, directory, dtype=torch.float32, blocks=64, block_size=8, seed=0):
        self.device = open_device("cpu")
        config = read_config(directory)
        packed, where = format_of(config.quantization), self.device.torch_device
        with CheckpointWeights(directory, dtype, where, packed=packed) as weights:
            self.model = Decoder(config, weights, self.device, config.max_positions)
        self.features = config.vision.feature_size if config.vision else 0
        self.block_size = block_size
        self.heads = config.num_heads, config.num_kv_heads, config.head_dim
        shape = (blocks, block_size, config.num_kv_heads, config.head_dim)
        self.caches = [
            KVCache(torch.full(shape, 1e3, dtype=dtype), torch.full(shape, -1e3, dtype=dtype))
            for _ in range(config.num_layers)
        ]
        self.free = random.Random(seed).sample(range(blocks), blocks)

    def step(self, prefills, decodes=(), final=False):
        """Run one step: `prefills` are (sequence, tokens), `decodes` sequences. With `final` it
        runs once more for the last token of each row alone, and says the same of these."""
        rows, tokens, positions, slots = [], [], [], []
        for sequence, count in [*prefills, *((sequence, 1) for sequence in decodes)]:
            begin, end = sequence.done, sequence.done + count
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            tokens += sequence.tokens[begin:end].tolist()
            positions += range(begin, end)
            slots += [
                sequence.blocks[at // self.block_size] * self.block_size + at % self.block_size
                for at in range(begin, end)
            ]
            sequence.done = end
            rows.append((sequence, count))
        batch = attention_batch(
            self.device,
            [sequence.blocks for sequence, _ in rows],
            [(count, sequence.done) for sequence, count in prefills],
            [sequence.done for sequence in decodes],
            self.heads,
            self.block_size,
            places=slots,
        )
        places = torch.tensor(positions)
        if any(sequence.positions is not None for sequence, _ in rows):
            places, visual = self.images(rows)
            batch = dataclasses.replace(batch, visual=visual)
        with torch.inference_mode():
            inputs = ForwardInputs(torch.tensor(tokens), places, self.caches, batch)
            hidden = self.model.forward(inputs)
            logits = self.model.logits(hidden)
            if final:
                self.run_final(rows, inputs, logits)
        for (sequence, _), part in zip(rows, logits.split([n for _, n in rows]), strict=True):
            sequence.logits.append(part)

    def run_final(self, rows, inputs, whole):
        before = [(cache.keys.clone(), cache.values.clone()) for cache in self.caches]
        ends = torch.tensor([count for _, count in rows]).cumsum(0).int() - 1
        alone = attention_batch(
            self.device,
            [sequence.blocks for sequence, _ in rows],
            [],
            [sequence.done for sequence, _ in rows],
            self.heads,
            self.block_size,
        )

        def narrowed(ends, plan):
            batch = dataclasses.replace(inputs.batch, final_rows=FinalRows(ends, plan))
            return self.model.forward(dataclasses.replace(inputs, batch=batch))

        hidden = narrowed(ends, lambda: alone)
        assert_close(self.model.logits(hidden), whole[ends])
        for cache, kept in zip(self.caches, before, strict=True):
            for now, then in zip((cache.keys, cache.values), kept, strict=True):
                assert torch.equal(now, then)
        assert not len(narrowed(ends[:0], lambda: pytest.fail("there is nothing to plan")))

    def images(self, rows):
        """Positions, and the features of those tokens of these rows that are of images."""
        positions, first, tokens = [], 0, sum(count for _, count in rows)
        seen, features = torch.zeros(tokens, 1).bool(), torch.zeros(tokens, self.features)
        for sequence, count in rows:
            at = torch.arange(sequence.done - count, sequence.done)
            positions.append(at.expand(3, -1))
            if sequence.positions is not None:
                positions[-1] = sequence.positions[:, at]
                mask = sequence.visual[at]
                before = int(sequence.visual[: int(at[0])].sum())
                seen[first : first + count][mask] = True
                features[first : first + count][mask] = sequence.features[
                    before : before + int(mask.sum())
                ]
            first += count
        return torch.cat(positions, dim=1), VisualTokens(seen, features)


def random_tokens(count, seed):
    return torch.randint(211, (count,), generator=torch.Generator().manual_seed(seed))


def reference(model, tokens):
    with torch.inference_mode():
        return model(tokens[None]).logits[0]


def assert_close(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


@pytest.fixture(scope="module", params=ALONE)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_checkpoint(directory, **ALONE[request.param])


def test_test_checkpoints_tell_right_from_wrong(checkpoint):
    _, model = checkpoint
    logits = torch.cat([reference(model, random_tokens(LENGTH, seed)) for seed in range(4)])
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05
    assert len(logits.argmax(-1).unique()) > 20


def test_a_whole_prompt_in_one_row_gives_the_logits_of_transformers(checkpoint):
    directory, model = checkpoint
    sequence = Sequence(random_tokens(LENGTH, 1))
    Driver(directory).step([(sequence, LENGTH)])
    assert_close(sequence.result(), reference(model, sequence.tokens))


@pytest.mark.parametrize("sizes", [[1], [7], [8], [20], [1, 13, 2, 16, 3]], ids=str)
def test_ragged_chunks_give_the_logits_of_transformers(checkpoint, sizes):
    directory, model = checkpoint
    driver, sequence, steps = Driver(directory), Sequence(random_tokens(LENGTH, 2)), 0
    while sequence.left:
        driver.step([(sequence, min(sizes[steps % len(sizes)], sequence.left))])
        steps += 1
    assert_close(sequence.result(), reference(model, sequence.tokens))


def test_a_last_layer_that_computes_final_rows_alone_gives_the_same(checkpoint):
    """Chunks with and without a prefix, with rows that decode; keys and values are all there."""
    directory, _ = checkpoint
    driver = Driver(directory)
    first, second, third = (Sequence(random_tokens(n, n)) for n in (30, 41, 20))
    driver.step([(first, 9), (second, 17)], final=True)
    driver.step([(second, 24), (third, 20)], [first], final=True)
    driver.step([(first, 20)], final=True)


@pytest.mark.parametrize("prompt", [1, 8, 29])
def test_decoding_token_by_token_gives_the_logits_of_transformers(checkpoint, prompt):
    directory, model = checkpoint
    driver, sequence = Driver(directory), Sequence(random_tokens(LENGTH, 3))
    driver.step([(sequence, prompt)])
    while sequence.left:
        driver.step([], [sequence])
    assert_close(sequence.result(), reference(model, sequence.tokens))


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_mixed_batches_of_ragged_rows_give_the_logits_of_transformers(checkpoint, block_size):
    directory, model = checkpoint
    rng = random.Random(block_size)
    driver = Driver(directory, blocks=400 // block_size, block_size=block_size, seed=block_size)
    lengths = [1, 3, 16, 17, 40, 60, 150]
    sequences = [Sequence(random_tokens(n, seed)) for seed, n in enumerate(lengths)]
    prompts = {s: rng.randint(1, len(s.tokens)) for s in sequences}
    mixed = 0
    while live := [s for s in sequences if s.left]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        prefills = [s for s in chosen if s.done < prompts[s]]
        decodes = [s for s in chosen if s.done >= prompts[s]]
        mixed += bool(prefills and decodes)
        counts = [min(rng.randint(1, 30), prompts[s] - s.done) for s in prefills]
        driver.step(list(zip(prefills, counts, strict=True)), decodes)
    assert mixed
    for sequence in sequences:
        assert_close(sequence.result(), reference(model, sequence.tokens))


def test_a_shared_prefix_in_the_cache_need_not_be_computed_again(checkpoint):
    directory, model = checkpoint
    driver, tokens = Driver(directory), random_tokens(LENGTH, 4)
    first = Sequence(tokens)
    driver.step([(first, LENGTH)])
    for shared in (8, 40):
        other = Sequence(torch.cat([tokens[:shared], random_tokens(11, shared)]))
        other.blocks, other.done = first.blocks[: shared // 8], shared
        driver.step([(other, other.left)])
        assert_close(other.result(), reference(model, other.tokens)[shared:])


# -- data types --------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_checkpoints_load_as_float32(tmp_path, stored):
    model = make_checkpoint(tmp_path, dtype=stored)
    assert read_config(tmp_path).dtype == str(stored).removeprefix("torch.")
    sequence = Sequence(random_tokens(LENGTH, 5))
    Driver(tmp_path).step([(sequence, LENGTH)])
    assert sequence.result().dtype == torch.float32
    assert_close(sequence.result(), reference(model, sequence.tokens))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_computing_in_bfloat16_stays_near_float32_and_as_near_as_transformers(tmp_path, stored):
    model = make_checkpoint(tmp_path, dtype=stored)
    driver, sequence = Driver(tmp_path, torch.bfloat16), Sequence(random_tokens(LENGTH, 6))
    expected = reference(model, sequence.tokens)
    driver.step([(sequence, 20)])
    while sequence.left:
        driver.step([], [sequence])
    found = sequence.result()
    assert found.dtype == torch.bfloat16
    theirs = reference(model.to(torch.bfloat16), sequence.tokens).float()

    def error(logits):
        return (logits.float() - expected).pow(2).mean().sqrt() / expected.std()

    assert error(found) < 0.1
    assert error(found) < 1.5 * error(theirs)


# -- rotary embedding --------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default_theta": {"rope_type": "default", "rope_theta": 5e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {**YARN, "original_max_position_embeddings": 512},
    "yarn_without_original_length": YARN,
    "yarn_factor_1": {**YARN, "factor": 1.0, "original_max_position_embeddings": 2048},
    "yarn_attention_factor": {
        **YARN,
        "attention_factor": 1.7,
        "original_max_position_embeddings": 512,
    },
    "yarn_mscale_alone": {**YARN, "mscale": 0.7, "original_max_position_embeddings": 512},
    "yarn_mscales": {
        **YARN,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 512,
    },
    "yarn_attention_factor_before_mscales": {
        **YARN,
        "attention_factor": 1.1,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 512,
    },
    "yarn_betas": {
        **YARN,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 512,
    },
    "yarn_not_truncated": {
        **YARN,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "yarn_narrow_blend": {
        **YARN,
        "truncate": False,
        "beta_fast": 1.05,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 512,
    },
    "yarn_hardly_any_blend": {
        **YARN,
        "truncate": False,
        "beta_fast": 2.01,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 512,
    },
    "yarn_short_and_not_truncated": {
        **YARN,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("head_dim", [24, 128])
@pytest.mark.parametrize("name", ROPES)
def test_cosines_and_sines_are_those_of_transformers(tmp_path, name, head_dim):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    sizes = {**SMALL, "head_dim": head_dim, "max_position_embeddings": 2048}
    theirs = Qwen3Config(**sizes, rope_parameters=dict(ROPES[name]))
    ours = parse_config({**sizes, "rope_parameters": ROPES[name]})
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path).rope == ours.rope
    positions = torch.arange(2048)
    cos, sin = RotaryEmbedding(ours.rope, head_dim, 2048)(positions)
    expected = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    for found, whole in zip((cos, sin), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(torch.cat([found, found], -1), whole[0], atol=2e-4, rtol=0)


def test_rotary_tables_in_half_precision_are_rounded_float32():
    rope = RopeConfig("default", 10000.0)
    positions = torch.tensor([0, 3, 511])
    wide = RotaryEmbedding(rope, 24, 512)(positions)
    half = RotaryEmbedding(rope, 24, 512).to(torch.device("cpu"), torch.bfloat16)(positions)
    for found, expected in zip(half, wide, strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_the_older_style_of_configuration_means_the_same_rope(name, key):
    scaling = dict(ROPES[name])
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    older = {"rope_theta": theta, "rope_scaling": {key: kind, **scaling}}
    newer = {"rope_parameters": ROPES[name]}
    assert parse_config({**SMALL, **older}).rope == parse_config({**SMALL, **newer}).rope


def test_older_configurations_without_scaling_keep_their_theta():
    older = parse_config({**SMALL, "rope_theta": 1e6, "rope_scaling": None})
    assert older.rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaling_added_to_a_file_that_has_rope_parameters_is_not_ignored(tmp_path, key):
    # What Qwen3's model cards tell users to add, in a file that transformers 5 saved.
    rope = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    raw = {**SMALL, "rope_parameters": ROPES["default"], "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    from transformers import Qwen3Config

    theirs = Qwen3Config.from_pretrained(tmp_path).rope_parameters
    ours = read_config(tmp_path).rope
    assert (ours.kind, ours.factor) == (theirs["rope_type"], theirs["factor"])


@pytest.mark.parametrize("sections", [(24, 20, 20), (4, 3, 5)])
def test_multimodal_positions_turn_interleaved_frequencies_as_in_transformers(sections):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    size = 2 * sum(sections)
    parameters = dict(rope_type="default", rope_theta=5e6, mrope_section=list(sections))
    config = Qwen3VLTextConfig(
        head_dim=size, hidden_size=size, num_attention_heads=1, rope_parameters=parameters
    )
    positions = torch.randint(0, 500, (3, 40), generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1, 40, size)
    expected = Qwen3VLTextRotaryEmbedding(config)(x, positions[:, None])
    rope = RotaryEmbedding(RopeConfig("default", 5e6, sections=sections), size, 512)
    for found, wanted in zip(rope(positions), expected, strict=True):
        torch.testing.assert_close(found, wanted[0, :, : size // 2])
    # Text has the same position three times: one lookup, the same angles.
    same = positions[:1].expand(3, -1)
    for found, wanted in zip(rope(same), rope(positions[0]), strict=True):
        assert torch.equal(found, wanted)
