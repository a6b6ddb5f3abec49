"""All tensors are checked before the values of any are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoactor.models.config import read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.errors import WeightsError
from nanoactor.models.families.registry import family_of
from nanoactor.models.vision.tower import VisionTower
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.files import INDEX, TensorFiles
from nanoactor.models.weights.fp8 import E4M3
from nanoactor.models.weights.headers import Headers, check_tensors, requested_bytes
from nanoactor.models.weights.random_weights import RandomWeights
from nanoactor.models.weights.weights import format_of
from nanoactor.runner.open import open_executor
from tests.engine.harness import rank_config
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.test_layers import Ranks

LAST = "model.layers.1"
"""Of the small checkpoints, which have more than one layer."""


def split(directory, count=3):
    """Distribute the tensors of a checkpoint among several files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = sorted(tensors)
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in names[number::count]}, directory / file)
    listed = {name: files[at % count] for at, name in enumerate(names)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def changed(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


FAULTS = {
    "missing": ("untied", f"{LAST}.mlp.down_proj.weight", None),
    "norm": ("tied", "model.norm.weight", lambda t: t.new_ones(3)),
    "head": ("untied", "lm_head.weight", lambda t: t[:5].clone()),
    "transposed": ("untied", f"{LAST}.mlp.up_proj.weight", lambda t: t.T.contiguous()),
    "integers": ("untied", f"{LAST}.self_attn.q_proj.weight", lambda t: t.to(torch.int32)),
    "expert": ("qwen3_moe", f"{LAST}.mlp.experts.7.down_proj.weight", lambda t: t[:, 1:].clone()),
    "missing expert": ("qwen3_moe", f"{LAST}.mlp.experts.7.up_proj.weight", None),
    "router": ("qwen3_moe", f"{LAST}.mlp.gate.weight", None),
    "no scales": ("fp8", f"{LAST}.mlp.down_proj.weight_scale_inv", None),
    "scales": ("fp8", f"{LAST}.mlp.up_proj.weight_scale_inv", lambda t: t[1:].clone()),
    "not packed": ("fp8", f"{LAST}.self_attn.o_proj.weight", lambda t: t.float()),
    "tower": ("qwen3_vl", "model.visual.merger.norm.weight", None),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_found_before_any_is_read(
    monkeypatch, tmp_path, fault, sharded
):
    """The message names the tensor, and the file that has it or should list it."""
    configuration, name, change = FAULTS[fault]
    make_checkpoint(tmp_path, **CONFIGURATIONS[configuration])
    changed(
        tmp_path,
        lambda t: t.pop(name) if change is None else t.update({name: change(t[name])}),
    )
    if sharded:
        split(tmp_path)
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")) as caught:
        open_executor(rank_config(tmp_path, device="cpu", dtype="float32", num_kv_blocks=64))
    assert (INDEX if sharded and change is None else ".safetensors") in str(caught.value)


def recorded(monkeypatch):
    """The tensors that are checked, in this order."""
    found, check = [], TensorFiles.check

    def record(self, name, shape, stored):
        found.append((name, shape, stored))
        return check(self, name, shape, stored)

    monkeypatch.setattr(TensorFiles, "check", record)
    return found


def loaded(monkeypatch, kind):
    """Names, shapes and dtypes of the results."""
    found, load = {}, kind._load

    def record(self, name, *arguments):
        tensor = load(self, name, *arguments)
        found[name] = tensor.shape, tensor.dtype
        return tensor

    monkeypatch.setattr(kind, "_load", record)
    return found


def builder(config, group=None):
    def build(weights, device):
        Decoder(config, weights, device, 64, group)
        if config.vision is not None:
            prefix = family_of(config.architecture).vision_prefix
            VisionTower(config.vision, weights, device, prefix)

    return build


@pytest.mark.parametrize("rank", [None, 1], ids=["alone", "second of two"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_headers_are_asked_for_what_is_read_later(monkeypatch, tmp_path, configuration, rank):
    make_checkpoint(tmp_path, **CONFIGURATIONS[configuration])
    config = read_config(tmp_path)
    group = None if rank is None else Ranks(rank, 3 if config.num_kv_heads == 3 else 2)
    build = builder(config, group)
    asked = recorded(monkeypatch)
    checked, read = loaded(monkeypatch, Headers), loaded(monkeypatch, CheckpointWeights)
    with CheckpointWeights(
        tmp_path, torch.bfloat16, torch.device("cpu"), packed=format_of(config.quantization)
    ) as weights:
        check_tensors(weights, build)
        assert not read
        before = asked.copy()
        build(weights, open_device("cpu"))
    assert asked == before * 2
    assert checked.items() <= read.items(), "equal projections are made once"


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_weights_are_as_large_as_the_tensors_of_a_checkpoint(tmp_path, configuration, unpacked):
    """Those of all ranks together, also random ones. A tensor that is not used does not count."""
    make_checkpoint(tmp_path, **CONFIGURATIONS[configuration])
    config, cpu = read_config(tmp_path), torch.device("cpu")
    packed = format_of(config.quantization)
    expected = sum(
        tensor.numel() * (1 if tensor.dtype == E4M3 and not unpacked else 4)
        for tensor in load_file(tmp_path / "model.safetensors").values()
    )
    changed(tmp_path, lambda tensors: tensors.update(spare=torch.zeros(100)))
    random = RandomWeights(torch.float32, cpu, packed)
    random._load = None
    with CheckpointWeights(tmp_path, torch.float32, cpu, packed=packed) as weights:
        for kind in (weights, random):
            for group in (None, Ranks(1, 3 if config.num_kv_heads == 3 else 2)):
                build = builder(config, group)
                assert requested_bytes(kind, build, unpacked=unpacked) == expected
