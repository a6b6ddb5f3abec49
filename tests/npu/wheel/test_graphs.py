"""Rung 3: graphs. torchair's own passes, converters and code generation; not the graph engine."""

import ast
import asyncio
import dataclasses
import logging
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torchair
import torchair.core._backend as backend
from torch._dynamo.utils import counters
from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

from nanoactor.models.devices.npu import graphs
from nanoactor.models.sampling.columns import pack
from nanoactor.runner.open import open_executor
from nanoactor.runner.steps.warmup import prefill_step
from tests.engine.harness import collect, engine, greedy, ids, ragged_prompts, rank_config
from tests.engine.test_accelerator import decode_step, submit
from tests.engine.test_vision import Eyes, check_all, jobs_of, run_all
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.npu.constrained import (
    CONSTRAINED,
    LIMITS,
    Driver,
    expected_replays,
    on_the_cpu,
    watch_replays,
)
from tests.npu.recorder import Recorder
from tests.npu.wheel.support import emulate, without_cann
from tests.runner.steps import step_of

pytestmark = pytest.mark.drawn(2)

LAYOUTS = ["tnd", "bnsd"]
MODES = ["max-autotune", "reduce-overhead"]
CASES = [
    pytest.param(MODES[0], "tnd", id=f"{MODES[0]}-tnd"),
    # Each takes ten seconds or more; whole steps are converted in every run, in both layouts.
    pytest.param(MODES[0], "bnsd", id=f"{MODES[0]}-bnsd", marks=pytest.mark.long),
    *[
        pytest.param(MODES[1], layout, id=f"{MODES[1]}-{layout}", marks=pytest.mark.long)
        for layout in LAYOUTS
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    make_checkpoint(directory, max_position_embeddings=1024, **changes)
    return directory


def executor(model, mode, layout, cache, **changes):
    values = dict(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64, block_size=128)
    values |= dict(device="npu", dtype="float32", num_kv_blocks=8, pipeline_depth=1)
    values |= dict(graph_mode=mode, attention_layout=layout, graph_cache_dir=str(cache)) | changes
    return open_executor(rank_config(model, **values))


@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_compiled_steps_give_the_cpus_tokens(model, monkeypatch, tmp_path, mode, layout):
    emulate(monkeypatch)
    prompts = ragged_prompts(211, [5, 126, 9], seed=6)

    async def outputs(**changes):
        limits = dict(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=256)
        async with engine(model, placement="single", **limits, **changes) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(9)) for p in prompts))
            return [o.outputs[0].token_ids for o in found], await llm.statistics()

    options = dict(graph_mode=mode, attention_layout=layout, graph_cache_dir=str(tmp_path))
    with without_cann(run_eagerly=True):
        found, figures = asyncio.run(outputs(device="npu", num_kv_blocks=9, **options))
        assert counters["stats"]["unique_graphs"] == 3, "each size once, whatever the thread"
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    assert found == asyncio.run(outputs(device="cpu"))[0]


@pytest.mark.parametrize("configuration", ["qwen3_moe", "granite", "mistral", "fp8"])
def test_compiled_steps_of_other_families(tmp_path, monkeypatch, configuration):
    """Their operators are converted, and no step runs outside the graph."""
    emulate(monkeypatch)
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2)
    make_checkpoint(tmp_path, **{**CONFIGURATIONS[configuration], **changes})
    prompts = ragged_prompts(211, [5, 30], seed=6)

    async def outputs(**changes):
        limits = dict(max_num_seqs=2, max_num_batched_tokens=40, max_model_len=64)
        async with engine(tmp_path, placement="single", **limits, **changes) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(7)) for p in prompts))
            return [o.outputs[0].token_ids for o in found], await llm.statistics()

    options = dict(graph_mode="max-autotune", graph_cache_dir=str(tmp_path / "graphs"))
    with without_cann(run_eagerly=True):
        found, figures = asyncio.run(outputs(device="npu", num_kv_blocks=9, **options))
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    assert found == asyncio.run(outputs(device="cpu"))[0]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("tnd", "max-autotune"),
        pytest.param("bnsd", "reduce-overhead", marks=pytest.mark.long),
    ],
)
def test_compiled_steps_go_on_behind_images(tmp_path, monkeypatch, mode, layout):
    """Rotary positions of what follows are no longer the indices."""
    emulate(monkeypatch)
    rope = dict(rope_type="default", rope_theta=5e4, mrope_section=[24, 20, 20])
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2)
    eyes = Eyes(tmp_path, num_hidden_layers=2, rope_parameters=rope, **changes)
    jobs = jobs_of(3, 4)
    options = dict(device="npu", graph_mode=mode, attention_layout=layout, placement="single")
    options |= dict(max_num_seqs=3, max_num_batched_tokens=40, num_kv_blocks=9)

    async def main():
        async with engine(eyes.directory, graph_cache_dir=str(tmp_path), **options) as llm:
            return await run_all(llm, jobs, 6), await llm.statistics()

    with without_cann(run_eagerly=True):
        outputs, figures = asyncio.run(main())
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    check_all(eyes, jobs, outputs, 6)


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        (MODES[0], "tnd"),
        pytest.param(MODES[0], "bnsd", marks=pytest.mark.long),
        *(pytest.param(MODES[1], layout, marks=pytest.mark.long) for layout in LAYOUTS),
    ],
)
def test_nothing_is_compiled_while_sequences_grow(model, monkeypatch, tmp_path, mode, layout):
    """A hundred steps, over a block's end."""
    emulate(monkeypatch)
    with without_cann(run_eagerly=True):
        runs = executor(model, mode, layout, tmp_path)
        prompts = prefill_step(60, 2, 128)
        submit(runs, prompts).wait()
        joined = decode_step(2, prompts)
        submit(runs, joined).wait()
        compiled = counters["stats"]["unique_graphs"]
        assert compiled >= 2, "one for each size"
        for number in range(100):
            submit(runs, following(number, joined)).wait()
        assert runs._launcher.resident.tables.lengths[:2].tolist() == [131, 131]
        assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("tnd", "max-autotune"),
        pytest.param("bnsd", "reduce-overhead", marks=pytest.mark.long),
    ],
)
def test_continued_rows_replay_the_compiled_decode_steps(
    model, monkeypatch, tmp_path, mode, layout
):
    """Those of the next size, with their lengths; nothing is compiled for them."""
    emulate(monkeypatch)
    with without_cann(run_eagerly=True):
        runs = executor(model, mode, layout, tmp_path, **LIMITS)
        compiled, replays = counters["stats"]["unique_graphs"], watch_replays(runs)
        found = Driver(runs).run(5)
        assert counters["stats"]["unique_graphs"] == compiled == 3, "one for each size"
    assert replays == expected_replays(5)
    assert found == on_the_cpu(model, 5)


def following(number, joined):
    """One more token for both; after 98 of them each needs a second block."""
    if number != 97:
        return step_of(number=number + 3)
    slots = joined.rows.slots
    names = ("table_slots", "table_starts", "table_counts", "table_blocks")
    tables = dict(zip(names, (slots, slots * 0 + 1, slots * 0 + 1, slots + 2), strict=True))
    return step_of(number=number + 3, **tables)


def greedily(step):
    """The same, of sequences that are not sampled."""
    admissions = step.admissions
    words = np.frombuffer(pack({"temperature": 0.0}) * len(admissions.slots), np.int32)
    cold = dataclasses.replace(admissions, sampling=words.reshape(len(admissions.slots), -1))
    return dataclasses.replace(step, admissions=cold)


# -- the cache of compiled graphs -------------------------------------------------------------


def pretend(monkeypatch):
    """In place of the graph engine: inputs are counted, and results have the right shape."""
    runs = []

    def run(self, inputs, *args):
        runs.append(next(len(t) for t in inputs if t.dim() == 1 and t.dtype == torch.int32))
        return [torch.zeros(runs[-1], 32)]

    for name in ("load", "compile"):
        monkeypatch.setattr(backend.TorchNpuGraph, name, lambda self, *args, **kwargs: None)
    monkeypatch.setattr(backend.TorchNpuGraph, "run", run)
    return runs


# Every kind of node in a decode step: what is not on the list is news, good or bad.
NODES = {
    *("Data", "Const", "NetOutput", "Cast", "Reshape", "Unsqueeze", "ConcatV2", "SplitV"),
    *("GatherV2", "IndexByTensor", "Transpose", "MatMul", "RmsNorm", "AddRmsNorm", "SwiGlu"),
    *("ApplyRotaryPosEmb", "TensorMove", "NanToNum", "ScatterPaKvCache"),
    *("FusedInferAttentionScore", "Identity"),
}
LAYERS = 2


def converted(path):
    """The graph engine's operators in a file that `cache_compile` has written."""
    text = torchair.inference.readable_cache(str(path), print_output=False, file=f"{path}.py")
    assert text
    (code,) = re.findall(r"^serialized_graph = (b.*)$", Path(f"{path}.py").read_text(), re.M)
    model = ModelDef()
    model.ParseFromString(ast.literal_eval(code))
    return model.graph[0].op


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_decode_step_converts_to_known_nodes(model, monkeypatch, tmp_path, layout):
    emulate(monkeypatch)
    pretend(monkeypatch)
    with without_cann() as asked:
        executor(model, "max-autotune", layout, tmp_path)
    assert asked == {"ApplyRotaryPosEmb", "ScatterPaKvCache"}
    files = sorted(tmp_path.rglob("compiled_module"))
    assert len(files) == 2
    for path in files:
        nodes = Counter(node.type for node in converted(path))
        assert set(nodes) | {"Identity"} == NODES | ({"Range"} if layout == "tnd" else set())
        for each in ("FusedInferAttentionScore", "ScatterPaKvCache", "ApplyRotaryPosEmb"):
            assert nodes[each] == LAYERS
        # Queries and keys are copied for the rotation; the caches are written where they are.
        assert nodes["TensorMove"] == 2 * LAYERS


SMALL_LAUNCHES = 47


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_the_compiled_pass_so_many_operators_are_launched(
    model, monkeypatch, tmp_path, layout
):
    emulate(monkeypatch)
    runs = pretend(monkeypatch)
    with without_cann():
        made = executor(model, "max-autotune", layout, tmp_path)
        prompts = greedily(prefill_step(60, 2, 128))
        submit(made, prompts).wait()
        joined = greedily(decode_step(2, prompts))
        submit(made, joined).wait()
        # The pass itself is left out: nothing is compiled beneath a mode that looks on.
        hidden = torch.zeros(2, 32)
        monkeypatch.setattr(graphs.DecodePass, "forward", lambda self, *arguments: hidden)
        with Recorder() as recorder:
            submit(made, following(0, joined)).wait()
    assert runs[-1] == 2
    names = Counter(call.function._schema.name for call in recorder.calls)
    copies = 1  # the ids, to the host
    assert sum(names.values()) == SMALL_LAUNCHES + copies, names


def test_rows_that_continue_launch_two_operators_more(model, monkeypatch, tmp_path):
    """Others none, whoever waits for a mask alongside them."""
    emulate(monkeypatch)
    pretend(monkeypatch)
    counts, hidden = [], torch.zeros(4, 32)
    with without_cann():
        driver = Driver(executor(model, "max-autotune", "tnd", tmp_path, **LIMITS))
        driver.begin()
        monkeypatch.setattr(
            graphs.DecodePass, "forward", lambda self, ids, *arguments: hidden[: len(ids)]
        )
        for what in [{}, dict(continues=CONSTRAINED)]:
            with Recorder() as recorder:
                driver.step(**what)
            counts.append(Counter(call.function._schema.name for call in recorder.calls))
    usual, continuing = counts
    assert usual.total() == SMALL_LAUNCHES + 1, "the ids are copied to the host"
    sent = {"aten::copy_": 1, "aten::index_put_": 1, "aten::index_copy_": 1}
    assert continuing - usual == Counter(sent)
    assert continuing.total() == usual.total() + 3


@pytest.mark.parametrize("layout", ["tnd", pytest.param("bnsd", marks=pytest.mark.long)])
def test_compiled_graphs_are_written_read_and_used_again(
    model, monkeypatch, tmp_path, caplog, layout
):
    emulate(monkeypatch)
    runs = pretend(monkeypatch)
    cache = tmp_path / "cache"
    caplog.set_level(logging.INFO)

    def start(**changes):
        graphs._log_once.cache_clear()
        caplog.clear()
        runs.clear()
        with without_cann():
            made = executor(model, "max-autotune", layout, cache, **changes)
            assert made._launcher.graphs._captured.failed == 0
            assert runs == [2, 1], "largest first"
            return counters["stats"]["unique_graphs"], sorted(cache.rglob("compiled_module"))

    compiled, files = start()
    assert compiled == 2
    assert len(files) == 2
    assert "earlier start" not in caplog.text
    written = [path.read_bytes() for path in files]
    compiled, again = start()
    assert compiled == 0, "nothing is compiled anew"
    assert again == files
    assert [path.read_bytes() for path in files] == written
    assert "using graphs that an earlier start compiled" in caplog.text
    compiled, more = start(num_kv_blocks=9)
    assert compiled == 2, "other shapes, other graphs"
    assert len(more) == 4
