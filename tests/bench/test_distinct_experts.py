"""The count of the experts that rows have chosen, and the table by which vLLM routes."""

import sys
import types

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.distinct_experts import ChoiceRecorder, distinct, expected, summarize
from bench.vllm_routing import check_use, distinct_experts, install, register, table
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint


def test_the_experts_are_those_of_transformers(tmp_path):
    make_checkpoint(tmp_path, **CONFIGURATIONS["qwen3_moe"])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    recorder = ChoiceRecorder(tmp_path, 64, device="cpu", dtype="float32")
    vocabulary = reference.config.vocab_size
    for length in (5, 64, 1):
        tokens = np.random.default_rng(length).integers(0, vocabulary, length).tolist()
        with torch.inference_mode():
            scores = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
        assert recorder.choices(tokens) == [
            sorted(layer[-1].topk(3).indices.tolist()) for layer in scores
        ]


def test_distinct_experts_are_counted_in_each_layer():
    rows = [[[0, 1], [2, 3]], [[1, 0], [4, 5]], [[0, 7], [2, 5]]]
    assert distinct(rows) == [3, 4]
    assert summarize([3, 4]) == {"mean": 3.5, "min": 3, "max": 4}


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_the_table_is_drawn_uniformly(rows):
    drawn = table(128, 8)
    assert all(len(set(row)) == 8 for row in drawn.tolist())
    assert abs(distinct_experts(128, 8, rows) - expected(128, 8, rows)) < 4
    share = np.bincount(drawn.ravel(), minlength=128) / drawn.size * 128
    assert 0.8 < share.min() <= share.max() < 1.2


PACKAGES = ["vllm", "model_executor", "layers", "fused_moe", "router"]
MODULE = "routing_simulator_router"


@pytest.fixture
def strategies(monkeypatch):
    """The strategies of a package that looks like vLLM's."""
    found = {}
    simulated = types.SimpleNamespace(
        RoutingStrategy=object,
        RoutingSimulator=types.SimpleNamespace(register_strategy=found.__setitem__),
    )
    for depth in range(1, len(PACKAGES) + 1):
        name = ".".join(PACKAGES[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    setattr(sys.modules[".".join(PACKAGES)], MODULE, simulated)
    return found


def test_vllm_routes_each_row_by_the_table(tmp_path, monkeypatch, strategies):
    for name in ("PYTHONPATH", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "BENCH_TABLE_ROUTING_USED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    install(tmp_path)
    register()
    (strategy,) = strategies.values()
    with pytest.raises(RuntimeError, match="not routed by the table"):
        check_use()
    for tokens in (3, 5000):
        logits = torch.zeros(tokens, 128)
        weights, ids = strategy.route_tokens(logits, logits, 8, torch.int32)
        expected_ids = np.resize(table(128, 8), (tokens, 8))
        assert ids.dtype == torch.int32
        assert np.array_equal(ids.numpy(), expected_ids)
        assert torch.allclose(weights.sum(1), torch.ones(tokens))
    check_use()
