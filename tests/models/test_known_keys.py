"""What nobody thought of is refused: unknown keys, options without a kernel, missing weights."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig

from nanoactor.model_files.files import resolve_model
from nanoactor.models.config import parse_config
from nanoactor.models.devices.protocols import Linear
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.families.registry import FAMILIES
from tests.models.test_weights import load

CONFIGS = {
    "GraniteForCausalLM": GraniteConfig,
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen2MoeForCausalLM": Qwen2MoeConfig,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "Qwen3VLForConditionalGeneration": Qwen3VLConfig,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLMoeConfig,
}


def raw(architecture, **changes):
    written = json.loads(CONFIGS[architecture]().to_json_string())
    if "vision_config" in written:
        written["vision_config"]["out_hidden_size"] = written["text_config"]["hidden_size"]
    return {**written, "architectures": [architecture], **changes}


def test_every_family_is_here():
    assert {*CONFIGS} == {*FAMILIES}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_transformers_writes_is_known(architecture):
    assert parse_config(raw(architecture)).architecture == architecture


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("residual_multiplier", 0.22),
        ("final_logit_softcapping", 30.0),
        ("num_experts", 8),
        ("nobody_has_heard_of", [1]),
        ("hidden_activation", "gelu"),
        ("mlp_bias", True),
    ],
)
def test_what_might_change_results_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedModel, match=key):
        parse_config(raw("Qwen3ForCausalLM", **{key: value}))


DENSE = sorted(
    {*CONFIGS} - {"Qwen3VLForConditionalGeneration"} - {"Qwen3VLMoeForConditionalGeneration"}
)


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config", {"num_hidden_layers": 7}),
        ("vision_config", {"depth": 3}),
        ("image_token_id", 5),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("cross_attention_hidden_size", 64),
        ("pruned_heads", {"0": [1]}),
        ("use_sliding_window", True),
    ],
)
def test_what_a_family_does_not_read_is_refused_by_name(architecture, key, value):
    with pytest.raises(UnsupportedModel, match=key):
        parse_config(raw(architecture, **{key: value}))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteForCausalLM"])
def test_a_window_that_a_family_does_not_have_is_refused(architecture):
    parse_config(raw(architecture, sliding_window=None))
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        parse_config(raw(architecture, sliding_window=8))


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": False}], ids=str)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_that_is_switched_off_has_no_effect(architecture, switch):
    written = {k: v for k, v in raw(architecture).items() if k != "use_sliding_window"}
    config = parse_config(written | switch | dict(sliding_window=8, max_window_layers=2))
    assert config.window is None


@pytest.mark.parametrize(
    ("architecture", "place", "key"),
    [
        ("Qwen3ForCausalLM", "rope_parameters", "short_factor"),
        ("Qwen3VLForConditionalGeneration", "vision_config", "fullatt_block_indexes"),
        ("Qwen3VLForConditionalGeneration", "text_config", "num_experts"),
    ],
)
def test_objects_within_are_looked_into_as_well(architecture, place, key):
    changed = raw(architecture)
    changed[place] = {**changed[place], key: [4]}
    with pytest.raises(UnsupportedModel, match=key):
        parse_config(changed)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_what_asks_for_nothing_is_accepted(value):
    parse_config(raw("Qwen3ForCausalLM", nobody_has_heard_of=value, residual_multiplier=1.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": 5}, "layer_types must be a list"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": None, "factor": 4}}, "requires a rope_type"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "attention_factor": 0.0,
                }
            },
            "attention_factor",
        ),
    ],
)
def test_odd_values_are_typed_errors(changes, words):
    with pytest.raises(ModelError, match=words):
        parse_config(raw("Qwen3ForCausalLM", **changes))


@pytest.mark.parametrize(
    ("rope", "positions", "longest", "default"),
    [
        ({"rope_type": "default"}, 64, 64, 64),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            64,
            256,
            256,
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            96,
            128,
            128,
        ),
        # The longer length stands there already: it is not stretched again.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 64, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 64, 256, 64),
        ({"rope_type": "linear", "factor": 2.0}, 64, 128, 64),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
            64,
            64,
            64,
        ),
    ],
)
def test_a_stretched_model_has_the_length_that_it_was_stretched_to(
    rope, positions, longest, default
):
    rope = {"rope_theta": 10_000.0, **rope}
    changes = dict(rope_parameters=rope, max_position_embeddings=positions)
    config = parse_config(raw("Qwen3ForCausalLM", **changes))
    assert (config.max_context_length, config.default_max_length) == (longest, default)


def test_a_layer_that_cannot_give_its_weights_is_not_left_out(monkeypatch):
    """A kernel that takes the weights of all layers would compute fewer."""
    network = load(resolve_model("demo"))
    monkeypatch.setattr(network, "_head", Linear(torch.zeros(2, 2), None))
    whole = SimpleNamespace(weights=object)
    monkeypatch.setattr(network, "_layers", [whole, whole])
    assert len(network.weights().layers) == 2
    monkeypatch.setattr(network, "_layers", [whole, SimpleNamespace(weights=lambda: None)])
    assert network.weights() is None
