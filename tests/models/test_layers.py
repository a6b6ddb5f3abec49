"""Options of layers that a family may ask for, against plain PyTorch; the numbers are those of
transformers' models that have them."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.devices.protocols import Linear
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.families.family import dense_layers
from nanoactor.models.families.registry import FAMILIES, family_of, layers_of
from nanoactor.models.layers.attention import Attention
from nanoactor.models.layers.kinds import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    NormSpec,
)
from nanoactor.models.layers.rope import RotaryEmbedding
from nanoactor.models.model_config import RopeConfig
from nanoactor.models.parallel import shard_of
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.linear import Router
from nanoactor.models.weights.whole_step import LayerWeights, Mixture
from tests.models.checkpoints import CONFIGURATIONS, SMALL, make_checkpoint
from tests.models.summing import make_summing_checkpoint
from tests.models.summing_family import SUMMING
from tests.models.test_decoder import Driver, Sequence


@pytest.fixture
def device():
    return open_device("cpu")


class Ranks:
    """A group in which this rank is one of several; sums are taken by hand."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_reduce(self, x):
        return x


def register(monkeypatch, layers, family=None):
    """Let the family of Qwen3, or another one, have these layers."""
    family = dataclasses.replace(family or family_of("Qwen3ForCausalLM"), layers=layers)
    monkeypatch.setitem(FAMILIES, family.architecture, family)


def logits_of(directory, tokens):
    """float32 (tokens, vocabulary), in two chunks and then token by token."""
    model, sequence = Driver(directory), Sequence(torch.tensor(tokens))
    model.step([(sequence, 5)])
    model.step([(sequence, 4)])
    for _ in tokens[9:]:
        model.step([], [sequence])
    return torch.cat(sequence.logits)


TOKENS = [3, 77, 5, 120, 8, 8, 201, 44, 1, 90, 13, 7]


# -- fused projections --------------------------------------------------------------------


def fuse(directory, qkv):
    """Write a checkpoint's projections of each layer as one tensor, and gates and ups as one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    heads, kv, size = (SMALL[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    for number in range(SMALL["num_hidden_layers"]):
        at = f"model.layers.{number}"
        q, k, v = (tensors.pop(f"{at}.self_attn.{n}_proj.weight") for n in "qkv")
        if qkv == "grouped":
            parts = zip(q.chunk(kv), k.split(size), v.split(size), strict=True)
            fused = torch.cat([part for group in parts for part in group])
        else:
            fused = torch.cat((q, k, v))
        assert len(fused) == (heads + 2 * kv) * size
        tensors[f"{at}.self_attn.qkv_proj.weight"] = fused
        pair = [tensors.pop(f"{at}.mlp.{n}_proj.weight") for n in ("gate", "up")]
        tensors[f"{at}.mlp.gate_up_proj.weight"] = torch.cat(pair)
    save_file(tensors, path, {"format": "pt"})


def fused_layers(qkv):
    def layers(config):
        return tuple(
            dataclasses.replace(
                layer,
                mixer=dataclasses.replace(layer.mixer, qkv=qkv),
                feed_forward=dataclasses.replace(layer.feed_forward, fused=True),
            )
            for layer in dense_layers(config)
        )

    return layers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("qkv", ["stacked", "grouped"])
def test_fused_projections_are_those_they_were_made_of(tmp_path, monkeypatch, device, qkv, ranks):
    """Spans of unequal size, and of each rank: what is read is equal bit for bit."""
    make_checkpoint(tmp_path)
    config = read_config(tmp_path)

    def matrices():
        found = []
        for rank in range(ranks):
            with CheckpointWeights(tmp_path, torch.float32, device.torch_device) as weights:
                group = Ranks(rank, ranks)
                decoder = Decoder(config, weights, Plain(device), 64, group)
            for layer in decoder._layers:
                operators = layer._mixer.qkv, layer._feed_forward.gate_up
                found += [one.operator.weight for one in operators]
        return found

    separate = matrices()
    fuse(tmp_path, qkv)
    register(monkeypatch, fused_layers(qkv))
    for one, other in zip(separate, matrices(), strict=True):
        assert torch.equal(one, other)


class Plain:
    """A device whose products keep their matrices."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        return getattr(self._device, name)

    def linear(self, weights):
        return Linear(weights.dequantize(), weights.bias)


# -- norms --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_may_add_one_and_multiply_in_float32(device, dtype):
    """As Gemma and Qwen3-Next do: x / rms * (1 + w) in float32, rounded once."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    residual = torch.randn(5, 64, generator=generator).to(dtype)
    weight = torch.randn(64, generator=generator) + 1
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    found = device.rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-5, atol=1e-6)
    normed, total = device.add_rms_norm(x, residual, weight, 1e-6)
    assert total.dtype == normed.dtype == dtype
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(normed, device.rms_norm(total, weight, 1e-6))


def test_weights_of_norms_say_what_they_mean(tmp_path, monkeypatch, device):
    """A checkpoint whose norms hold w - 1 gives the logits of the one with w."""
    make_checkpoint(tmp_path)
    expected = logits_of(tmp_path, TOKENS)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    changed = {n: t - 1 if "norm" in n else t for n, t in tensors.items()}
    save_file(changed, path, {"format": "pt"})

    def layers(config):
        norm = NormSpec(config.rms_norm_eps, adds_one=True, in_float32=True)
        return tuple(
            dataclasses.replace(
                layer, norm=norm, mixer=dataclasses.replace(layer.mixer, qk_norm=norm)
            )
            for layer in dense_layers(config)
        )

    register(monkeypatch, layers)
    torch.testing.assert_close(logits_of(tmp_path, TOKENS), expected, rtol=2e-5, atol=2e-5)


# -- rotation and scales ------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [8, 16, 24])
def test_a_part_of_each_head_may_be_rotated(device, rotated):
    rope = RotaryEmbedding(RopeConfig("default", 1e4), rotated, 32)
    positions = torch.tensor([0, 3, 17, 31])
    x = torch.randn(4, 2, 24, generator=torch.Generator().manual_seed(2))
    found = device.rotary(x, *rope(positions))
    angles = positions[:, None] / 1e4 ** (torch.arange(0, rotated, 2) / rotated)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    half = rotated // 2
    expected = torch.complex(x[..., :half], x[..., half:rotated]) * turns
    parts = expected.real, expected.imag, x[..., rotated:]
    torch.testing.assert_close(found, torch.cat(parts, -1), rtol=1e-5, atol=1e-5)


def test_partial_rotation_runs_through_a_whole_model(tmp_path, monkeypatch):
    """What is not rotated is the same at every position: with one head dimension less, chunks and
    single tokens still agree, and differ from full rotation."""
    make_checkpoint(tmp_path)
    full = logits_of(tmp_path, TOKENS)

    def layers(config):
        return tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rotary_dim=8))
            for layer in dense_layers(config)
        )

    register(monkeypatch, layers)
    found = logits_of(tmp_path, TOKENS)
    model, sequence = Driver(tmp_path), Sequence(torch.tensor(TOKENS))
    model.step([(sequence, len(TOKENS))])
    torch.testing.assert_close(found, sequence.logits[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, full, atol=1e-2)


def test_layers_that_rotate_differently_are_refused(tmp_path, monkeypatch, device):
    make_checkpoint(tmp_path)

    def layers(config):
        first, *others = dense_layers(config)
        mixer = dataclasses.replace(first.mixer, rotary_dim=8)
        return (dataclasses.replace(first, mixer=mixer), *others)

    register(monkeypatch, layers)
    with pytest.raises(UnsupportedModel, match="different numbers of rotary dimensions"):
        Driver(tmp_path)


class Halved(Attention):
    """A part that inherits from a known one, and computes something else."""

    def __call__(self, x, state, step):
        return super().__call__(x, state, step) / 2


@dataclasses.dataclass(frozen=True, slots=True)
class HalvedSpec(AttentionSpec):
    implementation: ClassVar[str] = "tests.models.test_layers:Halved"


def plain(monkeypatch, tmp_path, change):
    """What the kernel of a whole step is given for a model whose layers are changed so."""
    make_checkpoint(tmp_path)
    register(monkeypatch, lambda config: tuple(map(change, dense_layers(config))))
    device = Plain(open_device("cpu"))
    with CheckpointWeights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        return Decoder(read_config(tmp_path), weights, device, 64).weights()


@pytest.mark.parametrize(
    "change",
    [
        dict(residual_scale=0.5),
        dict(mixer=AttentionSpec(scale=0.1, qk_norm=NormSpec(1e-6))),
        dict(mixer=AttentionSpec(rotary_dim=8, qk_norm=NormSpec(1e-6))),
        dict(mixer=AttentionSpec(qk_norm=NormSpec(1e-3))),
        dict(norm=NormSpec(1e-6, in_float32=True)),
        dict(norm=NormSpec(1e-2)),
        dict(mixer=HalvedSpec(qk_norm=NormSpec(1e-6))),
    ],
    ids=str,
)
def test_the_kernel_of_a_whole_step_gets_no_layer_that_it_does_not_know(
    monkeypatch, tmp_path, change
):
    """A tensor list that leaves something out would be computed without it."""
    assert plain(monkeypatch, tmp_path, lambda layer: dataclasses.replace(layer, **change)) is None


def test_the_kernel_of_a_whole_step_gets_all_layers_that_it_knows(monkeypatch, tmp_path):
    found = plain(monkeypatch, tmp_path, lambda layer: layer)
    assert len(found.layers) == SMALL["num_hidden_layers"]
    assert {f.name for f in dataclasses.fields(LayerWeights)} >= {"qkv", "gate_up"}


def test_every_field_of_a_layers_description_is_known_here():
    """A new one must be asked about by `DecoderLayer.weights`, or the kernel of a whole step would
    run without it: then it is added here."""
    names = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (LayerSpec, NormSpec)}
    assert names[LayerSpec] == {
        *("mixer", "feed_forward", "norm", "residual_scale", "input_norm", "post_norm")
    }
    assert names[NormSpec] == {"eps", "adds_one", "in_float32"}
    assert {f.name for f in dataclasses.fields(AttentionSpec)} == {
        *("qk_norm", "qkv_bias", "output_bias", "scale", "rotary_dim", "qkv", "name")
    }
    assert {f.name for f in dataclasses.fields(MLPSpec)} == {"inner", "bias", "fused", "name"}
    assert {f.name for f in dataclasses.fields(ExpertsSpec)} == {
        *("experts", "top_k", "inner", "renormalize", "name")
    }
    assert {f.name for f in dataclasses.fields(Router)} == {"weight", "top_k", "renormalize"}
    assert {f.name for f in dataclasses.fields(Mixture)} == {
        *("experts", "top_k", "inner", "renormalize")
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ForgetfulSpec(MixerSpec):
    """Describes a mixer with sums of each sequence, and does not say so."""

    implementation: ClassVar[str] = "tests.models.summing:RunningSum"


@dataclasses.dataclass(frozen=True, slots=True)
class MistakenSpec(AttentionSpec):
    keeps_slot_state: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("make", "family", "mixer", "told"),
    [
        (make_summing_checkpoint, SUMMING, ForgetfulSpec(), "is False, but RunningSum keeps [1-9]"),
        (make_checkpoint, None, MistakenSpec(qk_norm=NormSpec(1e-6)), "is True, but Attention kee"),
    ],
    ids=["missing", "too much"],
)
def test_a_description_that_contradicts_a_mixers_state_is_refused(
    monkeypatch, tmp_path, make, family, mixer, told
):
    """Otherwise a prefix hit would skip tokens that the state has not seen."""
    make(tmp_path)

    def layers(config):
        return tuple(dataclasses.replace(layer, mixer=mixer) for layer in dense_layers(config))

    register(monkeypatch, layers, family)
    with pytest.raises(TypeError, match=told):
        Driver(tmp_path)


# -- families -----------------------------------------------------------------------------


def config_file(**changes):
    text = dict(
        architectures=["MistralForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
        vocab_size=211,
    )
    return text | changes


@pytest.mark.parametrize(
    ("window", "longest"), [(None, 512), (512, 512), (600, 512), (100, 100), ("missing", 512)]
)
def test_sequences_of_mistral_do_not_grow_past_its_window(window, longest):
    changes = {} if window == "missing" else dict(sliding_window=window)
    config = parse_config(config_file(**changes))
    assert (config.max_context_length, config.default_max_length) == (longest, longest)


def test_a_stretched_rotation_does_not_reach_past_the_window():
    """A window longer than the file's positions may be shorter than these times the factor."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    config = parse_config(config_file(sliding_window=600, rope_parameters=yarn))
    assert (config.max_context_length, config.default_max_length) == (600, 600)


def test_a_window_that_the_file_leaves_out_is_transformers_own():
    config = parse_config(config_file(max_position_embeddings=32768))
    assert config.max_context_length == 4096


@pytest.mark.parametrize("window", [0, -1, "all", 1.5, True])
def test_a_window_that_is_none_is_named(window):
    with pytest.raises(ModelError, match="sliding_window"):
        parse_config(config_file(sliding_window=window))


@pytest.mark.parametrize("value", [0, -1.0, "x", float("nan")])
def test_a_scale_that_is_none_is_named(value):
    changes = dict(architectures=["GraniteForCausalLM"], residual_multiplier=value)
    with pytest.raises(ModelError, match="residual_multiplier"):
        parse_config(config_file(**changes))


def test_missing_scales_of_granite_are_transformers_own():
    scales = parse_config(config_file(architectures=["GraniteForCausalLM"])).scales
    assert dataclasses.astuple(scales) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_a_family_describes_each_layer(tmp_path, name):
    make_checkpoint(tmp_path, **CONFIGURATIONS[name])
    config = read_config(tmp_path)
    assert len(layers_of(config)) == config.num_layers
    assert shard_of(config).part(7).size == 7
