"""Rung 4: the whole engine on `npu:0` tensors of the soft device."""

import asyncio
from collections import Counter

import pytest
import torch
import torch_npu

import nanoactor.models.devices as devices
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.devices.npu.runtime import AscendRuntime
from nanoactor.models.devices.protocols import Memory
from nanoactor.models.options import DeviceOptions
from nanoactor.runner.open import open_executor
from nanoactor.runner.steps.warmup import prefill_step
from tests.engine.harness import Reference, collect, engine, ids, ragged_prompts, rank_config
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
from tests.npu.emulation import emulate_everywhere
from tests.npu.test_engine import kinds
from tests.npu.wheel.soft_device import SoftRuntime
from tests.npu.wheel.test_graphs import following, greedily

pytestmark = pytest.mark.drawn(2)

VARIANTS = [(layout, mode) for layout in ("tnd", "bnsd") for mode in ("npugraph", "eager")]
LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    made = make_checkpoint(directory, max_position_embeddings=1024, **changes)
    return directory, Reference(made)


@pytest.fixture
def opened(monkeypatch):
    found = []

    def open_device(name, rank=0, options=None):
        if name == "cpu":
            return original(name, rank, options)
        found.append(NPUDevice(SoftRuntime(0), options or DeviceOptions()))
        return found[-1]

    original = devices.open_device
    monkeypatch.setattr(devices, "open_device", open_device)
    return found


def outputs(model, prompts, **changes):
    limits = dict(max_num_seqs=5, max_num_batched_tokens=160, max_model_len=384)

    async def main():
        async with engine(model, placement="single", **limits, **changes) as llm:
            found = await asyncio.gather(
                *(collect(llm, ids(p), kinds(i, 9 + i)) for i, p in enumerate(prompts))
            )
            return [o.outputs[0] for o in found], await llm.statistics()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("tnd", "npugraph"),
        pytest.param("tnd", "eager", marks=pytest.mark.long),
        pytest.param("bnsd", "npugraph", marks=pytest.mark.long),
        ("bnsd", "eager"),
    ],
)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_engine_gives_the_cpus_tokens(model, opened, layout, mode, depth):
    directory, reference = model
    stem = ragged_prompts(211, [290], seed=1)[0]
    prompts = [stem, *([*stem[:end], end % 211, 5] for end in (130, 257))]
    prompts += ragged_prompts(211, [7, 140, 125, 126, 127], seed=2)
    options = dict(graph_mode=mode, attention_layout=layout, num_kv_blocks=5)
    found, figures = outputs(directory, prompts, device="npu", pipeline_depth=depth, **options)
    runtime = opened[-1].runtime
    assert opened[-1].torch_device == torch.device("npu", 0)
    assert figures["scheduler"]["actor"]["mixed_steps"] > 0
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    replays = [kind for kind, _ in runtime.log].count("replay")
    assert (replays > 15) == (mode == "npugraph")
    expected, _ = outputs(directory, prompts, device="cpu", num_kv_blocks=200)
    assert found == expected
    for number, prompt in enumerate(prompts):
        if kinds(number, 1).temperature == 0:
            reference.check(prompt, found[number].token_ids)
    assert not [name for name, what in runtime.mode.copies if what == "waits"]


@pytest.mark.parametrize("configuration", ["qwen3_moe", "granite", "mistral", "fp8"])
def test_other_families_give_the_cpus_tokens(tmp_path, opened, configuration):
    """Experts are sorted and multiplied in groups by recorded steps, which read no count back."""
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2)
    changes = {**CONFIGURATIONS[configuration], **changes}
    made = make_checkpoint(tmp_path, max_position_embeddings=1024, **changes)
    prompts = ragged_prompts(211, [7, 140, 33], seed=2)
    found, figures = outputs(tmp_path, prompts, device="npu", num_kv_blocks=9)
    runtime = opened[-1].runtime
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    assert [kind for kind, _ in runtime.log].count("replay") > 5
    expected, _ = outputs(tmp_path, prompts, device="cpu", num_kv_blocks=200)
    assert found == expected
    Reference(made).check(prompts[0], found[0].token_ids)
    assert not [name for name, what in runtime.mode.copies if what == "waits"]


def test_two_ranks_give_the_tokens_of_one(model, monkeypatch):
    """Two processes, `npu:0` and `npu:1`; their sums go over gloo instead of HCCL."""
    emulate_everywhere(monkeypatch, "tests.npu.wheel.soft_device:SoftRuntime")
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    prompts = ragged_prompts(211, [5, 130, 9, 127], seed=7)

    async def run(**changes):
        limits = dict(max_num_seqs=3, max_num_batched_tokens=90, max_model_len=256)
        async with engine(model[0], **limits, **changes) as llm:
            found = await asyncio.gather(
                *(collect(llm, ids(p), kinds(i, 8)) for i, p in enumerate(prompts))
            )
            return [o.outputs[0] for o in found]

    found = asyncio.run(run(device="npu", num_kv_blocks=6, tensor_parallel_size=2))
    assert found == asyncio.run(run(device="cpu"))


# -- what a step asks of the host --------------------------------------------------------------


def executor(directory, mode, layout, **changes):
    values = dict(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64, block_size=128)
    values |= dict(device="npu", dtype="float32", num_kv_blocks=8)
    values |= dict(graph_mode=mode, attention_layout=layout) | changes
    return open_executor(rank_config(directory, **values))


def steady(directory, mode, layout, sampling=greedily):
    """Two sequences that decode; returns the executor, and the step in which they joined."""
    runs = executor(directory, mode, layout)
    prompts = sampling(prefill_step(60, 2, 128))
    submit(runs, prompts).wait()
    joined = sampling(decode_step(2, prompts))
    submit(runs, joined).wait()
    return runs, joined


@pytest.mark.parametrize("layout", ["tnd", "bnsd"])
def test_a_captured_step_is_updates_of_lengths_and_one_launch(
    model, opened, monkeypatch, tmp_path, layout
):
    """Asserted on the calls that reach the runtime below torch_npu."""
    runs, joined = steady(model[0], "npugraph", layout)
    mode = opened[-1].runtime.mode
    for number in range(4):
        step = following(number, joined)
        trace = tmp_path / f"step{number}"
        monkeypatch.setenv("CANN_STUB_TRACE", str(trace))
        mode.launched.clear()
        mode.copies.clear()
        pending = submit(runs, step)
        monkeypatch.delenv("CANN_STUB_TRACE")
        pending.wait()
        calls = [c for c in trace.read_text().split() if c.startswith(("aclmdlRI", "aclrtMemcpy"))]
        update = ["aclmdlRICaptureTaskUpdateBegin", "aclmdlRICaptureTaskUpdateEnd"]
        assert [c for c in calls if c != "aclmdlRICaptureGetInfo"][: 2 * LAYERS + 1] == [
            *update * LAYERS,
            "aclmdlRIExecuteAsync",
        ]
        assert calls.count("aclmdlRIExecuteAsync") == 1
        # The lengths' update calls the operator, which goes into the graph; nothing else is called.
        assert mode.launched == ["npu_fused_infer_attention_score"] * LAYERS
        assert mode.copies == [("aten::copy_", "copies")], "the chosen ids, to the host"


def test_steps_in_flight_have_graphs_of_their_own(model, opened):
    """What runs must not see the lengths of what comes next."""
    runs, joined = steady(model[0], "npugraph", "tnd")
    log = opened[-1].runtime.log
    del log[:]
    for number in range(6):
        submit(runs, following(number, joined)).wait()
    graphs = [graph for _, graph in log[::2]]
    assert [kind for kind, _ in log] == ["update", "replay"] * 6
    assert log[::2] == [("update", graph) for graph in graphs]
    assert log[1::2] == [("replay", graph) for graph in graphs]
    assert graphs[0] != graphs[1]
    assert graphs == graphs[:2] * 3


EAGER_LAUNCHES = 17, 54
"""(for each layer, for a step)."""


@pytest.mark.parametrize("layout", ["tnd", "bnsd"])
def test_an_eager_step_launches_so_many_operators(model, opened, layout):
    runs, joined = steady(model[0], "eager", layout)
    mode = opened[-1].runtime.mode
    mode.launched.clear()
    mode.copies.clear()
    submit(runs, following(0, joined)).wait()
    each, once = EAGER_LAUNCHES
    assert len(mode.launched) == LAYERS * each + once, Counter(mode.launched)
    assert mode.copies == [("aten::copy_", "copies")], "the chosen ids, to the host"


SAMPLED_LAUNCHES = 208
"""More than where all are greedy; seven of them gather the rows' columns on the device, which the
host need not send then."""


def test_sampled_rows_launch_so_many_operators_more(model, opened):
    runs, joined = steady(model[0], "eager", "tnd", lambda step: step)
    mode = opened[-1].runtime.mode
    mode.launched.clear()
    submit(runs, following(0, joined)).wait()
    each, once = EAGER_LAUNCHES
    assert len(mode.launched) == LAYERS * each + once + SAMPLED_LAUNCHES, Counter(mode.launched)


@pytest.mark.parametrize(("layout", "mode"), [("tnd", "npugraph"), ("bnsd", "eager")])
def test_constrained_rows_choose_what_the_cpus_do(model, opened, layout, mode):
    """Rows that continue an output replay the recorded decode step of the next size."""
    runs = executor(model[0], mode, layout, **LIMITS)
    replays = watch_replays(runs)
    found = Driver(runs).run(5)
    assert replays == (expected_replays(5) if mode == "npugraph" else [])
    assert not [name for name, what in opened[-1].runtime.mode.copies if what == "waits"]
    assert found == on_the_cpu(model[0], 5)


CONTINUED_LAUNCHES, MASKED_LAUNCHES = 2, 23
"""More than in a step without constrained rows: where some continue an output, and where some
greedy ones choose under masks; one more in the step behind those that continued, as the list of
rows is what it was before."""


def test_constrained_rows_launch_so_many_operators_more(model, opened):
    driver = Driver(executor(model[0], "eager", "tnd", **LIMITS))
    driver.begin()
    mode = opened[-1].runtime.mode

    def launches(copies, **rows):
        mode.launched.clear()
        mode.copies.clear()
        driver.step(**rows)
        assert mode.copies == [("aten::copy_", "copies")] * copies
        return len(mode.launched)

    greedy = CONSTRAINED[:1]
    each, once = EAGER_LAUNCHES
    usual = LAYERS * each + once
    assert launches(1) == usual, "they wait, and the step is as long as before"
    # One copy to the device for all that is new, one to the host for all that choose.
    assert launches(3, chooses=greedy) == usual + MASKED_LAUNCHES
    assert launches(1) == usual
    assert launches(2, continues=CONSTRAINED) == usual + CONTINUED_LAUNCHES
    assert launches(2) == usual + 1
    assert launches(1) == usual
    driver.step(chooses=greedy)
    both = launches(3, continues=greedy, chooses=greedy)
    assert both == usual + CONTINUED_LAUNCHES + MASKED_LAUNCHES


def test_a_capture_is_groups_of_tasks_within_one_recording(model, opened, monkeypatch, tmp_path):
    """What npugraph_ex and torchair build upon: asserted on the runtime's calls."""
    trace = tmp_path / "capture"
    monkeypatch.setenv("CANN_STUB_TRACE", str(trace))
    executor(model[0], "npugraph", "tnd")
    monkeypatch.delenv("CANN_STUB_TRACE")
    wanted = ("CaptureBegin", "CaptureEnd", "TaskGrpBegin", "TaskGrpEnd")
    calls = [c.removeprefix("aclmdlRI") for c in trace.read_text().split() if c.endswith(wanted)]
    group = ["CaptureTaskGrpBegin", "CaptureTaskGrpEnd"]
    # Two sizes, each once for every step in flight.
    assert calls == ["CaptureBegin", *group * LAYERS, "CaptureEnd"] * 4


@pytest.mark.parametrize(
    "where", ["at the start", pytest.param("at the end", marks=pytest.mark.long)]
)
def test_a_recording_that_fails_leaves_nothing_behind(model, opened, monkeypatch, where):
    """torch_npu's mode would take what comes next for a part of it."""
    failing = [3, 5]
    kind = torch_npu.npu.NPUGraph
    begin, end = kind.capture_begin, kind.capture_end
    begun = []

    def capture_begin(self, *args, **kwargs):
        begun.append(self)
        if where == "at the start" and len(begun) in failing:
            raise RuntimeError("error code 107000: a recording cannot begin")
        begin(self, *args, **kwargs)

    def capture_end(self):
        end(self)
        if where == "at the end" and len(begun) in failing:
            raise RuntimeError("error code 207008: no stream is left")

    monkeypatch.setattr(kind, "capture_begin", capture_begin)
    monkeypatch.setattr(kind, "capture_end", capture_end)
    prompts = ragged_prompts(211, [5, 9, 20, 3, 8], seed=3)
    found, figures = outputs(model[0], prompts, device="npu", num_kv_blocks=6, pipeline_depth=1)
    assert len(begun) == 4, "5, 4, 2 and 1 rows, once each"
    assert found == outputs(model[0], prompts, device="cpu", num_kv_blocks=200)[0]
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0, "the next size takes them"


def test_recordings_share_a_pool_and_our_stream(model, opened, monkeypatch):
    asked = []
    original = torch_npu.npu.graph

    def graph(made, **options):
        asked.append(options)
        return original(made, **options)

    monkeypatch.setattr(torch_npu.npu, "graph", graph)
    executor(model[0], "npugraph", "tnd")
    runtime = opened[-1].runtime
    assert len(asked) == 4
    assert asked[0]["pool"] is None
    assert len({options["pool"] for options in asked[1:]}) == 1
    assert asked[1]["pool"] is not None
    for options in asked:
        assert options["stream"] == runtime._stream
        assert options["auto_dispatch_capture"]
        assert options["capture_error_mode"] == "thread_local"
    with runtime.stream():
        assert torch_npu.npu.current_stream() == runtime._stream
        assert runtime._stream != torch_npu.npu.default_stream()


def test_a_graph_may_go_while_another_is_recorded(opened):
    """Python may collect an executor's graphs at any time."""
    runtime = SoftRuntime(0)
    with runtime.stream():
        left = [runtime.record(lambda: torch.zeros(1, device="npu"))]

        def function():
            left.clear()
            return torch.ones(1, device="npu")

        runtime.record(function)
    assert not left


def test_memory_counts_what_pytorch_keeps_for_itself_as_free(opened, monkeypatch):
    runtime = SoftRuntime(0)
    figures = dict(memory_reserved=700, memory_allocated=500)
    for name, value in figures.items():
        monkeypatch.setattr(torch_npu.npu, name, lambda device, value=value: value)
    monkeypatch.setattr(torch_npu.npu, "mem_get_info", lambda device: (1000, 9000))
    assert runtime.memory() == Memory(9000, 1200)


@pytest.mark.parametrize(
    ("chip", "newer"),
    [
        ("Ascend910B2", True),
        ("Ascend910_9362", True),
        ("Ascend910A", False),
        ("Ascend310P3", False),
    ],
)
def test_chips_are_told_apart(monkeypatch, chip, newer):
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda index: chip)
    runtime = AscendRuntime(0)
    assert runtime.is_a2_or_a3 == newer
    assert runtime.supports(torch.bfloat16) == newer
    assert runtime.supports(torch.float16)
    assert not runtime.supports(torch.float32)


@pytest.mark.parametrize(("layout", "mode"), [("tnd", "npugraph"), ("bnsd", "eager")])
def test_images_are_seen_as_on_the_cpu(tmp_path, opened, layout, mode):
    """Encoded on `npu:0`, in slices and with text; nothing on their way waits for the device."""
    rope = dict(rope_type="default", rope_theta=5e4, mrope_section=[24, 20, 20])
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2)
    eyes = Eyes(tmp_path, num_hidden_layers=LAYERS, rope_parameters=rope, **changes)
    jobs = jobs_of(3, 6)

    async def main():
        options = dict(device="npu", graph_mode=mode, attention_layout=layout, placement="single")
        options |= dict(max_num_seqs=4, max_num_batched_tokens=24, num_kv_blocks=16)
        async with engine(eyes.directory, **options) as llm:
            return await run_all(llm, jobs, 6)

    check_all(eyes, jobs, asyncio.run(main()), 6)
    soft = opened[-1].runtime.mode
    assert soft.launched.count("npu_fusion_attention") > 0
    assert not [name for name, what in soft.copies if what == "waits"]
