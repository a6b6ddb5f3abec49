"""Checkpoints in every layout load alike; whatever is wrong with one is named by a typed error."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.errors import ModelError, UnsupportedModel, WeightsError
from nanoactor.models.parallel import Span
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.files import INDEX
from nanoactor.models.weights.linear import Part, Projection
from nanoactor.models.weights.read_ahead import ReadAhead
from tests.models.checkpoints import SMALL, make_checkpoint

CPU = torch.device("cpu")
HEAD = "lm_head.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """(directory with one file, directory with shards and index, transformers' model)."""
    single, sharded = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("sharded")
    model = make_checkpoint(single)
    make_checkpoint(sharded, shard="60KB")
    assert [f.name for f in single.glob("*.safetensors")] == ["model.safetensors"]
    assert len(list(sharded.glob("*.safetensors"))) > 3
    return single, sharded, model


@pytest.fixture
def single(originals, tmp_path):
    return shutil.copytree(originals[0], tmp_path / "single")


@pytest.fixture
def sharded(originals, tmp_path):
    return shutil.copytree(originals[1], tmp_path / "sharded")


def load(directory, dtype=torch.float32):
    with CheckpointWeights(directory, dtype, CPU) as weights:
        return Decoder(read_config(directory), weights, open_device("cpu"), 64)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fails(directory, error, *words):
    """Loading raises exactly this error, and its message has all the words."""
    with pytest.raises(error) as caught:
        load(directory)
    assert caught.type is error
    for word in words:
        assert str(word) in str(caught.value)


# -- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["single", "sharded", "sharded without index"])
def test_every_layout_gives_the_tensors_that_were_saved(originals, single, sharded, layout):
    directory = single if layout == "single" else sharded
    if layout == "sharded without index":
        (directory / INDEX).unlink()
    expected = originals[2].state_dict()
    with CheckpointWeights(directory, torch.float32, CPU) as weights:
        taken = {name: weights.load(name, *tensor.shape) for name, tensor in expected.items()}
        assert "model.layers.9.mlp.up_proj.weight" not in weights
        assert all(name in weights for name in expected)
    # They stay valid after the files are closed.
    for name, tensor in expected.items():
        assert torch.equal(taken[name], tensor), name


def test_fused_weights_are_stacked_in_the_order_of_their_names(originals, sharded):
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    parts = [originals[2].state_dict()[f"{name}.weight"] for name in names]
    wanted = tuple(Part(name, len(part)) for name, part in zip(names, parts, strict=True))
    with CheckpointWeights(sharded, torch.bfloat16, CPU) as weights:
        fused = weights.linear(Projection(wanted, 64)).dequantize()
    assert fused.dtype == torch.bfloat16
    assert torch.equal(fused, torch.cat(parts).bfloat16())


def test_rows_of_several_spans_come_in_their_order(originals, sharded):
    name = "model.layers.1.mlp.gate_proj"
    whole = originals[2].state_dict()[f"{name}.weight"]
    spans = (Span(90, 96), Span(0, 3), Span(40, 41))
    with CheckpointWeights(sharded, torch.float32, CPU) as weights:
        found = weights.linear(Projection((Part(name, 96, spans),), 64)).dequantize()
    assert torch.equal(found, torch.cat([whole[span.start : span.stop] for span in spans]))


def test_tensors_are_stacked_as_they_are_read(originals, sharded, monkeypatch):
    """Each goes to its place at once: of 18,432 experts no second copy is ever made."""
    names = [[f"model.layers.{n}.mlp.{kind}_proj" for kind in ("gate", "up")] for n in (0, 1)]
    state = originals[2].state_dict()
    whole = [[state[f"{name}.weight"][8:24] for name in both] for both in names]
    wanted = [
        Projection(tuple(Part(name, 96, (Span(8, 24),)) for name in both), 64) for both in names
    ]
    monkeypatch.setattr(torch, "stack", lambda *_: pytest.fail("all parts are there twice"))
    with CheckpointWeights(sharded, torch.float32, CPU) as weights:
        found = weights.load_stacked(wanted)
    monkeypatch.undo()
    for part, expected in zip(found.dequantize(), whole, strict=True):
        assert torch.equal(part, torch.cat(expected))


def test_a_tensor_keeps_the_type_that_is_asked_for(originals, sharded):
    name = "model.norm.weight"
    with CheckpointWeights(sharded, torch.bfloat16, CPU) as weights:
        found = weights.load(name, 64, dtype=torch.float32)
        with pytest.raises(WeightsError, match="norm.weight has dtype F32.*allows only F8_E4M3"):
            weights.load(name, 64, stored=torch.float8_e4m3fn)
    assert torch.equal(found, originals[2].state_dict()[name])


def test_tied_checkpoints_need_no_head(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    with CheckpointWeights(tmp_path, torch.float32, CPU) as weights:
        assert HEAD not in weights
    load(tmp_path)


# -- damaged weights ---------------------------------------------------------------------------


def test_a_directory_without_safetensors_is_named(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    fails(single, WeightsError, single, ".safetensors")


def test_a_missing_file_is_named_with_the_index_that_asks_for_it(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    fails(sharded, WeightsError, gone, INDEX)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_truncated_file_is_named(single, sharded, layout, kept):
    directory = single if layout == "single" else sharded
    path = sorted(directory.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    fails(directory, WeightsError, path, "incomplete")


def test_a_file_of_another_format_is_named(single):
    path = single / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    fails(single, WeightsError, path)


def test_a_missing_weight_is_named(single, sharded):
    edit(single / "config.json", num_hidden_layers=3)
    fails(single, WeightsError, single, "model.layers.2.", "config.json")
    edit(sharded / "config.json", attention_bias=True)
    fails(sharded, WeightsError, sharded, "model.layers.0.self_attn.q_proj.bias")


def test_an_untied_model_without_a_head_is_an_error(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    fails(tmp_path, WeightsError, tmp_path, HEAD)


def test_a_wrong_shape_is_named_with_both_shapes(single):
    edit(single / "config.json", intermediate_size=95)
    fails(single, WeightsError, "model.safetensors", GATE, "(96, 64)", "(95, 64)")


def test_a_wrong_number_of_dimensions_is_a_wrong_shape(single):
    with CheckpointWeights(single, torch.float32, CPU) as weights:
        for shape in [(64,), (96,), (96, 64, 1), (64, 96), ()]:
            with pytest.raises(WeightsError, match=GATE):
                weights.load(GATE, *shape)


def test_an_index_that_lists_a_weight_its_file_lacks_is_named(sharded):
    mapping = json.loads((sharded / INDEX).read_text())["weight_map"]
    wrong = next(file for file in mapping.values() if file != mapping[GATE])
    edit(sharded / INDEX, weight_map={**mapping, GATE: wrong})
    fails(sharded, WeightsError, sharded / wrong, GATE)


def test_an_index_that_leaves_a_weight_out_means_it_is_missing(sharded):
    mapping = json.loads((sharded / INDEX).read_text())["weight_map"]
    del mapping[GATE]
    edit(sharded / INDEX, weight_map=mapping)
    fails(sharded, WeightsError, GATE)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "",
        "\xff\xfe",
        "[]",
        "{}",
        '{"weight_map": ["model.safetensors"]}',
        '{"weight_map": {"lm_head.weight": null}}',
        '{"weight_map": {"lm_head.weight": ["model.safetensors"]}}',
    ],
)
def test_a_broken_index_is_named(sharded, content):
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    fails(sharded, WeightsError, sharded / INDEX)


def resave(directory, change, name="model.safetensors"):
    """Write a directory's weights anew, after `change` has had its way with them."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_quantized_are_refused(single, dtype):
    resave(single, lambda tensors: tensors.update({GATE: tensors[GATE].to(dtype)}))
    fails(single, WeightsError, "model.safetensors", GATE, "has dtype", "allows only F64, F32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite_are_refused_unless_that_is_switched_off(single, name, value):
    resave(single, lambda tensors: tensors[name].flatten()[-1:].fill_(value))
    fails(single, WeightsError, name, "not finite", "check_weights")
    with CheckpointWeights(single, torch.float32, CPU, check=False) as weights:
        Decoder(read_config(single), weights, open_device("cpu"), 64)


def test_weights_that_the_wanted_type_cannot_hold_are_refused(single):
    resave(single, lambda tensors: tensors[GATE].flatten()[-1:].fill_(-1e5))
    with pytest.raises(WeightsError, match=r"-100000, which torch.float16 cannot"):
        load(single, torch.float16)
    load(single, torch.bfloat16)


def test_a_tensor_in_two_files_is_an_error(single):
    def only_one(tensors):
        for name in tensors.keys() - {GATE}:
            del tensors[name]

    resave(single, only_one, "more.safetensors")
    fails(single, WeightsError, "model.safetensors", "more.safetensors", GATE)


def warnings_of(directory, caplog):
    with CheckpointWeights(directory, torch.float32, CPU) as weights:
        Decoder(read_config(directory), weights, open_device("cpu"), 64)
        weights.warn_about_unused()
    return [record.getMessage() for record in caplog.records]


def test_tensors_that_nobody_uses_are_named(single, caplog):
    adapter = {f"model.layers.0.self_attn.q_proj.lora_{n}.weight": torch.ones(2, 2) for n in "AB"}
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert not warnings_of(single, caplog)
    resave(single, lambda tensors: tensors.update(adapter | spare))
    (told,) = warnings_of(single, caplog)
    assert "2 tensors that the model does not use" in told
    assert all(name in told for name in adapter)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ""])
def test_an_index_names_files_of_its_own_directory_alone(sharded, name):
    path = sharded / INDEX
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    fails(sharded, WeightsError, path, "only files in its own directory")


def test_a_shard_that_is_a_pipe_is_not_waited_for(sharded):
    shard = next(sharded.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    fails(sharded, WeightsError, shard, "is not a regular file")


def test_a_file_that_the_index_does_not_name_is_named(sharded, caplog):
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], sharded / "older.safetensors")
    (told,) = warnings_of(sharded, caplog)
    assert "older.safetensors" in told


def test_a_broken_link_is_named_with_its_target(single):
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("../blobs/gone")
    fails(single, WeightsError, "model.safetensors is a link to ../blobs/gone")


def test_loaded_weights_do_not_refer_to_the_file(single):
    """Else an overwritten file would change answers, and a shortened one end the process."""
    model = load(single)
    path = single / "model.safetensors"
    assert str(path) not in Path("/proc/self/maps").read_text()

    def logits():
        embedded = model._embedding(torch.arange(4))
        return model.logits(model._norm.add(embedded, embedded)[0])

    before = logits()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(logits(), before)


def test_json_files_may_begin_with_a_byte_order_mark(sharded):
    for name in ("config.json", INDEX):
        content = (sharded / name).read_text()
        (sharded / name).write_text(content, encoding="utf-8-sig")
    load(sharded)


# -- configurations ----------------------------------------------------------------------------


def test_a_missing_configuration_is_named(single):
    (single / "config.json").unlink()
    fails(single, ModelError, single / "config.json", "does not exist")


@pytest.mark.parametrize("content", ["", "{", '{"hidden_size": 6', "[1, 2]", "null", "\xff\xfe"])
def test_a_malformed_configuration_is_named(single, content):
    (single / "config.json").write_bytes(content.encode("latin-1"))
    fails(single, ModelError, single / "config.json", "JSON")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), ["'dynamic'", "chunked"]),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), ["'dynamic'", "chunked"]),
        (dict(rope_parameters={"rope_type": "longrope"}), ["'longrope'", "yarn and llama3"]),
        (dict(layer_types=["full_attention", "sliding_attention"]), ["'sliding_attention'"]),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
        (
            dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            ["partial_rotary_factor"],
        ),
        (dict(use_sliding_window=True, sliding_window=4096), ["use_sliding_window"]),
        (dict(quantization_config={"quant_method": "gptq"}), ["'gptq'", "supported methods: fp8"]),
        (dict(hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
        (dict(dtype="float8_e4m3fn"), ["'float8_e4m3fn'", "float32, bfloat16, float16"]),
        (dict(architectures=["GemmaForCausalLM"]), ["'GemmaForCausalLM'", "Qwen3ForCausalLM"]),
        (dict(architectures=[]), ["Qwen3ForCausalLM"]),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(single, changes, words):
    content = json.loads((single / "config.json").read_text())
    if "rope_scaling" in changes:
        content.pop("rope_parameters")
    (single / "config.json").write_text(json.dumps({**content, **changes}))
    fails(single, UnsupportedModel, *words)


SIZES = [key for key in SMALL if key not in ("num_key_value_heads", "head_dim")]
OPTIONAL_SIZES = ["num_key_value_heads", "head_dim"]


@pytest.mark.parametrize("key", [*SIZES, *OPTIONAL_SIZES])
@pytest.mark.parametrize("value", [0, -1, 64.0, "64", True, [64]], ids=repr)
def test_sizes_must_be_positive_whole_numbers(key, value):
    with pytest.raises(ModelError, match=rf"here: {key} must be a positive .*") as caught:
        parse_config({**SMALL, key: value}, "here")
    assert str(caught.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_every_model_has_must_be_given(key):
    for raw in ({k: v for k, v in SMALL.items() if k != key}, {**SMALL, key: None}):
        with pytest.raises(ModelError, match=f"here: {key} must"):
            parse_config(raw, "here")


def test_heads_must_share_key_value_heads_evenly():
    with pytest.raises(ModelError, match=r"num_attention_heads 4 .* num_key_value_heads 3"):
        parse_config({**SMALL, "num_key_value_heads": 3})


def test_head_dim_must_be_even():
    with pytest.raises(ModelError, match=r"head_dim must be even, got 23"):
        parse_config({**SMALL, "head_dim": 23})


@pytest.mark.parametrize("factor", [None, 0, 0.5, -4.0, "4"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scalings_need_a_factor_of_at_least_one(kind, factor):
    with pytest.raises(ModelError, match="here: .*factor"):
        parse_config({**SMALL, "rope_parameters": {"rope_type": kind, "factor": factor}}, "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 3),
        ("rms_norm_eps", None),
        ("rms_norm_eps", "small"),
        ("eos_token_id", "</s>"),
        ("rope_theta", "large"),
        ("rope_scaling", "yarn"),
        ("rope_parameters", ["yarn"]),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2, "beta_fast": "many"}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2, "attention_factor": "much"}),
    ],
)
def test_values_of_a_wrong_type_are_model_errors_that_name_the_key(key, value):
    named = list(value)[-1] if isinstance(value, dict) else key
    with pytest.raises(ModelError, match=named):
        parse_config({**SMALL, key: value}, "here")


YARN = {"rope_type": "yarn", "factor": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(vocab_size=10**12), "vocab_size must be at most 16777216"),
        (dict(num_hidden_layers=2**21), "num_hidden_layers must be at most 1048576"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number"),
        (dict(rms_norm_eps=-1e-6), "rms_norm_eps must be at least 0"),
        (dict(rope_theta=0), "rope_theta must be greater than 0"),
        (dict(rope_theta=-1.0), "rope_theta must be greater than 0"),
        (dict(rope_theta=float("inf")), "rope_theta must be a finite number"),
        (dict(rope_theta=10**400), "rope_theta must be a finite number"),
        (dict(rope_parameters={"rope_type": "linear", "factor": float("inf")}), "factor"),
        (dict(rope_parameters=YARN | dict(factor=float("nan"))), "factor"),
        (
            dict(rope_parameters=YARN | dict(beta_fast=0, beta_slow=0)),
            "beta_fast must be greater than 0",
        ),
        (
            dict(rope_parameters=YARN | dict(beta_fast=2, beta_slow=2)),
            "beta_fast must be greater than",
        ),
        (dict(rope_parameters=YARN | dict(beta_slow=-1)), "beta_slow must be greater than 0"),
        (dict(rope_parameters=YARN | dict(rope_theta=1.0)), "rope_theta other than 1"),
        (
            dict(rope_parameters=YARN | dict(original_max_position_embeddings="x")),
            "original_max_position_embeddings must be a positive integer",
        ),
        (dict(rope_parameters=YARN | dict(truncate="no")), "truncate must be true or false"),
        (dict(attention_bias="no"), "attention_bias must be true or false"),
        (dict(tie_word_embeddings=0), "tie_word_embeddings must be true or false"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_model_errors_that_name_the_key(changes, text):
    with pytest.raises(ModelError, match=f"here: .*{text}"):
        parse_config({**SMALL, **changes}, "here")


def test_an_unknown_architecture_is_named_before_all_that_its_file_lacks():
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": dict(SMALL)}
    with pytest.raises(UnsupportedModel, match="'Gemma3ForCond.*' is not supp"):
        parse_config(raw)


def test_end_of_sequence_ids_may_be_none_one_or_several():
    for raw, expected in ((None, ()), (2, (2,)), ([2, 5], (2, 5)), ([], ())):
        assert parse_config({**SMALL, "eos_token_id": raw}).eos_token_ids == expected
    assert parse_config(SMALL).eos_token_ids == ()


def test_the_stored_type_may_be_given_in_either_style():
    for raw in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}):
        assert parse_config({**SMALL, **raw}).dtype == "bfloat16"
    assert parse_config(SMALL).dtype == "float32"


def test_weights_of_a_module_that_is_left_out_are_not_called_unused(tmp_path, caplog):
    make_checkpoint(tmp_path, family="Qwen3VL")
    with CheckpointWeights(tmp_path, torch.float32, CPU) as weights:
        Decoder(read_config(tmp_path), weights, open_device("cpu"), 64)
        weights.warn_about_unused(["model.visual."])
        assert not caplog.records
        weights.warn_about_unused(["model.visual"])
    (told,) = [record.getMessage() for record in caplog.records]
    assert "model.visual.blocks" in told


def test_a_tied_files_own_head_counts_as_in_transformers(single, caplog):
    """One that is the embedding again is not kept twice."""
    edit(single / "config.json", tie_word_embeddings=True)

    def head():
        config = read_config(single)
        with CheckpointWeights(single, torch.float32, CPU) as weights:
            network = Decoder(config, weights, open_device("cpu"), 64)
            return network._head_weight(weights), network._embedding.weight

    found, embedding = head()
    assert not torch.equal(found, embedding)
    assert "differs from the embedding" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(single, dtype=torch.float32)
    assert torch.equal(found, model.lm_head.weight)

    def same(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    resave(single, same)
    caplog.clear()
    found, embedding = head()
    assert found is embedding
    assert not caplog.records


def test_parts_of_a_tensor_advance_the_read_ahead_once(monkeypatch, single):
    """Otherwise it would be further ahead of the loader than its window."""
    counts = []
    monkeypatch.setattr(ReadAhead, "advance", lambda _, count: counts.append(count))
    with CheckpointWeights(single, torch.float32, CPU) as weights:
        shape = weights.shape_of(GATE)
        whole = weights.load(GATE, *shape)
        parts = [weights.load(GATE, *shape, rows=Span(n, n + 8)) for n in (0, 8)]
    assert torch.equal(torch.cat(parts), whole[:16])
    assert counts == [whole.numel() * 4]
