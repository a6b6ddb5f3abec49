"""The engine on an accelerator: the same tokens as on the CPU, graphs or none, and what a GPU alone
can show. Without a GPU its executor runs over Triton's interpreter: slow, so one small case."""

import asyncio
import copy
import dataclasses
import statistics
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanoactor.models.devices as devices
from nanoactor import SamplingParams
from nanoactor.actors.runner import RunnerActor
from nanoactor.models.batch import ForwardInputs
from nanoactor.models.devices.cuda.kernels import batch as slots_kernels
from nanoactor.models.errors import NotEnoughMemory
from nanoactor.models.sampling.columns import pack
from nanoactor.models.seq_lens import NO_SEQ_LENS
from nanoactor.runner.executor import DeviceExecutor
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.open import open_executor
from nanoactor.runner.steps import graphs
from nanoactor.runner.steps.graphs import CapturedSteps
from nanoactor.runner.steps.warmup import admissions, prefill_step
from tests.engine.harness import (
    Reference,
    collect,
    engine,
    greedy,
    ids,
    ragged_prompts,
    rank_config,
)
from tests.engine.test_matrix import MATRIX, covering, loads, run
from tests.engine.test_vision import END, IMAGE, START, Eyes, check_all, image, run_all
from tests.models.batches import attention_batch
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.models.interpreted import InterpretedDevice
from tests.runner.steps import DECODE, SAMPLE, step_of

__all__ = ["loads"]

# The interpreter computes in NumPy, which warns where 32-bit products wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCABULARY = 211
# Their sublayers run here each time, op by op; whole engines of them are left to `make test-long`.
LATER = ["qwen2", "llama3", "qwen3_moe"]


def decode_step(rows, before):
    """One token for each of so many slots, after a prefill step: those that had no part in it
    have a sequence of their own, one token long, in block 0."""
    slots = np.arange(rows, dtype=np.int32)
    new = slots[len(before.rows) :]
    ones, joins = np.ones(len(new), np.int32), [(slot, 1, 1, SAMPLE | DECODE) for slot in slots]
    tables = dict(table_slots=new, table_starts=0 * ones, table_counts=ones, table_blocks=0 * ones)
    return step_of(*joins, number=2, new=admissions(slots), **tables)


def submit(executor, step):
    """What the runner's loop and the device's thread do with a step."""
    return executor.launch(executor.prepare(step))


# -- anywhere ----------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(devices, "open_device", lambda *_: InterpretedDevice())


def mixed_params(tokens):
    """Cut, plain, greedy and masked. The first is sampled behind the graph, and while it decodes
    the prompts of others are computed."""
    kinds = [dict(min_p=0.05), dict(), dict(top_k=20, top_p=0.9)]
    sampled = [
        SamplingParams.for_model(
            temperature=0.9, seed=i, max_tokens=2 * tokens, ignore_eos=True, **kind
        )
        for i, kind in enumerate(kinds)
    ]
    masked = SamplingParams.for_model(
        temperature=0.0,
        max_tokens=tokens,
        min_tokens=min(4, tokens),
        stop_token_ids=list(range(0, 211, 2)),
    )
    return [*sampled, masked, greedy(tokens), greedy(tokens + 3)]


def rehearse_before_each_step(monkeypatch):
    """How many parts the rehearsals had: they change nothing of what is computed."""
    rehearsed, on_step = set(), RunnerActor._on_step

    def rehearse_first(self, step):
        if not self._queued_tokens:
            rehearsed.add(sum(1 for _ in self.rehearse()))
        on_step(self, step)

    monkeypatch.setattr(RunnerActor, "_on_step", rehearse_first)
    return rehearsed


def test_a_step_is_launched_where_it_arrives_unless_others_are_under_way(
    interpreted, monkeypatch, tmp_path
):
    launched, launch = [], DeviceExecutor.launch

    def noted(self, prepared):
        launched.append(threading.current_thread().name)
        return launch(self, prepared)

    monkeypatch.setattr(DeviceExecutor, "launch", noted)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    make_checkpoint(tmp_path, **CONFIGURATIONS["untied"], **heads)
    limits = dict(max_num_seqs=4, max_num_batched_tokens=9, block_size=4, max_model_len=16)

    async def main():
        async with engine(tmp_path, placement="single", num_kv_blocks=8, **limits) as llm:
            launched.clear()
            await collect(llm, ids([1, 2, 3]), greedy(6))

    asyncio.run(main())
    assert launched[0] == "MainThread"
    assert "device" in launched


@pytest.mark.long
@pytest.mark.timeout(300)
def test_prompts_beyond_a_sizes_rows_take_a_larger_one(interpreted, monkeypatch, tmp_path):
    """Captured steps of three sizes, of which each holds more prompts than the one before."""
    monkeypatch.setattr(graphs, "_PREFILL_TOKENS", (4, 8, 16))
    monkeypatch.setattr(graphs, "_PROMPTS", ((16, 4), (8, 2), (0, 1)))
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    reference = Reference(make_checkpoint(tmp_path, **CONFIGURATIONS["untied"], **heads))
    prompts = ragged_prompts(VOCABULARY, [2, 1, 3, 2, 4, 1, 9, 5])
    limits = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, max_model_len=16)

    async def main():
        async with engine(tmp_path, placement="single", num_kv_blocks=20, **limits) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(3)) for p in prompts))
            return found, (await llm.statistics())["runner.0"]["actor"]

    found, figures = asyncio.run(main())
    assert figures["steps_uncaptured"] == figures["steps_too_large"] == 0
    for prompt, output in zip(prompts, found, strict=True):
        reference.check(prompt, output.outputs[0].token_ids)
    reference.conclude()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(each, marks=pytest.mark.long) for each in LATER)]
)
def test_the_executor_gives_the_cpus_tokens(interpreted, monkeypatch, tmp_path, eager, name):
    """Four sequences at a time, a cache too small for them, graphs with padded rows."""
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    # The interpreter takes seconds for each launch: two layers are left to the long run.
    layers = 1 if name == "untied" else 2
    model = make_checkpoint(tmp_path, **CONFIGURATIONS[name], **heads, num_hidden_layers=layers)
    prompts = ragged_prompts(VOCABULARY, [5, 9, 7, 11, 3, 6])
    limits = dict(max_num_seqs=4, max_num_batched_tokens=9, block_size=4, max_model_len=16)

    async def outputs(**changes):
        async with engine(tmp_path, placement="single", **limits, **changes) as llm:
            requests = zip(prompts, mixed_params(3), strict=True)
            found = await asyncio.gather(*(collect(llm, ids(p), q) for p, q in requests))
            return [output.outputs[0] for output in found], await llm.statistics()

    rehearsed = rehearse_before_each_step(monkeypatch)
    found, figures = asyncio.run(outputs(num_kv_blocks=5, enforce_eager=eager))
    assert rehearsed == {2}, "a layout, and its packing"
    assert figures["scheduler"]["actor"]["mixed_steps"] > 0
    assert figures["scheduler"]["actor"]["preemptions"] > 0
    monkeypatch.undo()
    expected, _ = asyncio.run(outputs(device="cpu", num_kv_blocks=60))
    assert found == expected
    reference = Reference(model)
    for number in (4, 5):
        reference.check(prompts[number], found[number].token_ids)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_steps_whose_prompts_have_images_are_captured_too(interpreted, tmp_path):
    """Padded like those of text; text alongside them comes out the same, and what follows."""
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    eyes = Eyes(tmp_path, num_hidden_layers=3, **heads)
    shown = image(1, 20, 20)  # nine tokens: more than a step has
    jobs = [
        ([5, START, IMAGE, END, 7], [shown]),
        ([1, 2, 3, 4], []),
        ([START, IMAGE, END], [shown]),
    ]
    ran = []

    async def main():
        limits = dict(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_kv_blocks=20)
        async with engine(tmp_path, placement="single", max_model_len=24, **limits) as llm:
            return await run_all(llm, jobs, 2)

    replay = CapturedSteps.replay_mixed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CapturedSteps, "replay_mixed", lambda own, size: ran.append(size) or replay(own, size)
        )
        outputs = asyncio.run(main())
    check_all(eyes, jobs, outputs, 2)
    assert {size.has_images for size in ran} == {True, False}


class Launches(TorchDispatchMode):
    """Names what is launched: PyTorch's operators, and Triton's kernels where they are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_decode_step_of_a_model_that_sees_launches_what_one_of_text_does(
    interpreted, monkeypatch, tmp_path
):
    """The rotary positions behind images are one sum within the kernel that lays out rows."""
    kernels = []
    for name in ("advance", "fill_slot_mapping"):
        kernel = getattr(slots_kernels, name)
        monkeypatch.setattr(
            slots_kernels, name, lambda *a, n=name, k=kernel: kernels.append(n) or k(*a)
        )
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    limits = dict(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=16, num_kv_blocks=8)
    launched = {}
    for family in ("Qwen3", "Qwen3VL"):
        make_checkpoint(tmp_path / family, family=family, **heads)
        config = rank_config(tmp_path / family, device="cuda", enforce_eager=True, **limits)
        runs = open_executor(config)
        submit(runs, prefill_step(2, 2, runs.block_size)).wait()
        kernels.clear()
        with Launches() as mode, torch.inference_mode():
            runs._launcher.forward.decode(2, NO_SEQ_LENS)
        launched[family] = [*kernels, *mode.names]
    assert launched["Qwen3VL"] == launched["Qwen3"]
    assert "advance" in launched["Qwen3"]


def test_a_cache_that_is_too_small_is_refused_with_the_arithmetic(interpreted, tmp_path):
    make_checkpoint(tmp_path)
    limits = dict(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=16, block_size=16)
    config = rank_config(tmp_path, device="cuda", **limits, memory_utilization=0.05)
    with pytest.raises(NotEnoughMemory, match=r"MiB free - .* MiB of weights - .* MiB for a step"):
        open_executor(config)


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.device_count() > 7:
        pytest.skip("it is there")
    with pytest.raises(devices.UnsupportedModel, match="cuda:7 does not exist: PyTorch .* sees"):
        devices.open_device("cuda:7")


def test_without_triton_the_portable_device_is_taken():
    """In a process in which Triton cannot be imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from nanoactor.models.devices.cuda.device import HAS_TRITON, PORTABLE_TRAITS\n"
        "assert not HAS_TRITON and not PORTABLE_TRAITS.captures_graphs"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "budget", "depth", "lead"), sorted(covering(), key=str), ids=str)
def test_every_schedule_gives_the_cpus_tokens(loads, name, budget, depth, lead):
    """Half of them with graphs, at each lead and budget; most of their steps are padded."""
    eager = MATRIX.index((name, budget, depth, lead)) // 2 % 2 == 0
    load = loads(name)
    changes = dict(placement="single", device="cuda", enforce_eager=eager)
    figures = asyncio.run(run(load, budget, depth, lead, **changes))
    assert figures["aborted"] == figures["cut_short"] == len(load.given_up)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Heads of 128, as real models have."""
    directory = tmp_path_factory.mktemp("wide")
    shape = dict(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, head_dim=128)
    model = make_checkpoint(directory, **shape, intermediate_size=512, max_position_embeddings=4096)
    return directory, model


@pytest.mark.gpu
def test_a_thousand_sequences_of_one_token(wide):
    directory, model = wide
    reference = Reference(model)
    prompts = ragged_prompts(VOCABULARY, [1] * 1024, seed=3)

    async def main():
        limits = dict(max_num_seqs=1024, max_num_batched_tokens=1024, max_model_len=64)
        async with engine(directory, device="cuda", num_kv_blocks=1100, **limits) as llm:
            outputs = await asyncio.gather(*(collect(llm, ids(p), greedy(9)) for p in prompts))
        for prompt, output in zip(prompts[:40], outputs, strict=False):
            reference.check(prompt, output.outputs[0].token_ids)
        by_prompt = {}
        for prompt, output in zip(prompts, outputs, strict=True):
            same = by_prompt.setdefault(tuple(prompt), output.outputs[0].token_ids)
            assert same == output.outputs[0].token_ids

    asyncio.run(main())
    reference.conclude()


@pytest.mark.gpu
def test_a_burst_of_short_prompts_is_captured_and_exact(wide):
    """64 of them in a step, then steps with a few, some sampled; nothing operator by operator."""
    directory, model = wide
    reference = Reference(model)
    prompts = ragged_prompts(VOCABULARY, [33 + n % 13 for n in range(150)], seed=5)
    asked = [
        greedy(6)
        if n % 3
        else SamplingParams.for_model(temperature=0.9, seed=n, max_tokens=6, top_k=20)
        for n in range(len(prompts))
    ]

    async def outputs(**changes):
        limits = dict(max_num_seqs=150, max_num_batched_tokens=2048, num_kv_blocks=1000)
        async with engine(directory, device="cuda", max_model_len=64, **limits, **changes) as llm:
            found = await asyncio.gather(
                *(collect(llm, ids(p), params) for p, params in zip(prompts, asked, strict=True))
            )
            figures = await llm.statistics()
        return [output.outputs[0].token_ids for output in found], figures["runner.0"]["actor"]

    found, figures = asyncio.run(outputs())
    assert figures["steps_uncaptured"] == figures["steps_too_large"] == 0
    assert figures["steps"] < 30
    for n in range(1, len(prompts), 3):
        reference.check(prompts[n], found[n])
    reference.conclude()


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_one_block_more_than_a_sequence_needs(wide, eager):
    directory, model = wide
    reference = Reference(model)
    prompts = ragged_prompts(VOCABULARY, [900, 30, 500, 70], seed=4)

    async def main():
        limits = dict(max_model_len=1024, block_size=64, num_kv_blocks=17)
        async with engine(
            directory, device="cuda", max_num_batched_tokens=128, enforce_eager=eager, **limits
        ) as llm:
            outputs = await asyncio.gather(*(collect(llm, ids(p), greedy(100)) for p in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            reference.check(prompt, output.outputs[0].token_ids)

    asyncio.run(main())
    reference.conclude()


KINDS = {
    "dense": dict(),
    "fp8": dict(fp8_blocks=(128, 128)),
    "experts": dict(
        family="Qwen3Moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256
    ),
}
KINDS["experts in fp8"] = KINDS["experts"] | KINDS["fp8"]


@pytest.fixture(scope="module", params=KINDS)
def executor(request, tmp_path_factory):
    """256 rows under way, in this process."""
    directory = tmp_path_factory.mktemp("kind")
    sizes = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=4096)
    heads = dict(num_hidden_layers=3, num_attention_heads=4, head_dim=128)
    make_checkpoint(directory, scale=1 / 16, **sizes, **heads, **KINDS[request.param])
    return make_executor(directory, 256)


def make_executor(directory, rows):
    limits = dict(max_model_len=2048, max_num_seqs=rows, max_num_batched_tokens=4096)
    options = dict(device="cuda", dtype="bfloat16", memory_utilization=0.2)
    return open_executor(rank_config(directory, **options, **limits))


@pytest.mark.gpu
def test_no_step_waits_for_the_device(executor):
    """PyTorch raises where an operator would synchronise; the ids arrive by events alone."""
    prompt = prefill_step(700, 5, 64)
    whole = prefill_step(4096, 16, 64)
    join, join_whole = decode_step(256, prompt), decode_step(256, whole)
    steps = [prompt, join, dataclasses.replace(nothing_new(join), leaves=join.rows.slots)]
    large, uncaptured = executor.too_large, executor.uncaptured
    steps += [cut_short(whole), join_whole, *[nothing_new(join_whole)] * 3]
    pending, counts = [], []
    with warnings.catch_warnings():  # "a prototype feature"
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            pending.append(submit(executor, step))
            counts.append(pending[-1].buffers.rows)
            if len(pending) > 1:
                pending[-2].wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts == [5, 256, 0, 16, 256, 256, 256, 256]
    assert executor.uncaptured == uncaptured
    assert executor.too_large == large + 1, "the prompts of 4,096 tokens alone"


def cut_short(step):
    """The same with top-k, top-p and min-p."""
    packed = [pack({"top_k": slot % 3 * 9, "top_p": 0.9}) for slot in step.admissions.slots]
    words = np.frombuffer(b"".join(packed), np.int32).reshape(len(packed), -1)
    return dataclasses.replace(
        step, admissions=dataclasses.replace(step.admissions, sampling=words)
    )


def nothing_new(step):
    """A decode step in which nothing changes."""
    return step_of(number=step.step)


@pytest.mark.gpu
def test_host_time_does_not_grow_with_the_batch(wide):
    executor = make_executor(wide[0], 1024)
    taken = {}
    for rows in (1, 64, 256, 1024):
        prompts = prefill_step(rows, rows, 64)
        submit(executor, prompts).wait()
        join = decode_step(rows, prompts)
        submit(executor, join).wait()
        steady, times = nothing_new(join), []
        for _ in range(200):
            begin = time.perf_counter()
            pending = submit(executor, steady)
            times.append(time.perf_counter() - begin)
            pending.wait()
        taken[rows] = statistics.median(times) * 1e6
        submit(executor, dataclasses.replace(steady, leaves=join.rows.slots)).wait()
    print("host time per decode step, us:", {rows: round(us, 1) for rows, us in taken.items()})
    assert taken[1024] < 2 * taken[1] + 20


def our_logits(directory, dtype, tokens, block):
    """Of a prompt, in one chunk and then token by token; float64 on the host."""
    limits = dict(max_model_len=2048, max_num_seqs=2, max_num_batched_tokens=256)
    options = dict(device="cuda", dtype=dtype, block_size=block, num_kv_blocks=64)
    config = rank_config(directory, **options, **limits)
    device = devices.open_device("cuda")
    with device.stream():
        model = LoadedModel(config, device)
        states = model.allocate(64, 2)
        length, half = len(tokens), len(tokens) // 2
        ids_ = torch.tensor(tokens, device="cuda")
        positions = torch.arange(length, device="cuda")
        table = [list(range(64))]
        heads = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
        chunk = attention_batch(device, table, [(half, half)], [], heads, block, places=range(half))
        first = ForwardInputs(ids_[:half], positions[:half], states, chunk)
        hidden = [model.network.forward(first)]
        for at in range(half, length):
            one = positions[at : at + 1]
            step = attention_batch(device, table, [], [at + 1], heads, block, places=[at])
            inputs = ForwardInputs(ids_[at : at + 1], one, states, step)
            hidden.append(model.network.forward(inputs))
        return model.network.logits(torch.cat(hidden)).double().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_as_near_to_float64_as_transformers_own(wide, dtype, block):
    """And the arg-max is that of float64 wherever its margin exceeds the error."""
    directory, model = wide
    tokens = ragged_prompts(VOCABULARY, [300], seed=6)[0]
    ids_ = torch.tensor([tokens], device="cuda")
    with torch.inference_mode():
        exact = copy.deepcopy(model).double().cuda()(ids_).logits[0].cpu()
        kind = getattr(torch, dtype)
        theirs = copy.deepcopy(model).to(kind).cuda()(ids_).logits[0].double().cpu()
    ours = our_logits(directory, dtype, tokens, block)
    errors = [(found - exact).abs() for found in (ours, theirs)]
    print(f"{dtype}: mean error {errors[0].mean():.2e}, transformers' {errors[1].mean():.2e}")
    assert errors[0].mean() <= 1.25 * errors[1].mean()
    assert errors[0].max() <= 2 * errors[1].max()
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * errors[0].max()
    assert clear.any()
    assert (ours.argmax(-1) == exact.argmax(-1))[clear].all()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["gqa_2", "tied", "attention_bias", "granite", "qwen3_moe"])
def test_two_gpus_give_the_tokens_of_one(tmp_path, name, eager):
    """Over NCCL, in processes of their own; captured steps hold the collectives."""
    changes = dict(CONFIGURATIONS[name])
    changes |= dict(num_attention_heads=4, num_key_value_heads=2) if name == "gqa_2" else {}
    model = make_checkpoint(tmp_path, **changes)
    prompts = ragged_prompts(VOCABULARY, [5, 12, 9, 20, 3, 7])
    limits = dict(max_num_seqs=4, max_num_batched_tokens=17, max_model_len=64, num_kv_blocks=40)

    async def outputs(**options):
        async with engine(tmp_path, device="cuda", block_size=4, **limits, **options) as llm:
            requests = zip(prompts, mixed_params(20), strict=True)
            return await asyncio.gather(*(collect(llm, ids(p), q) for p, q in requests))

    two = asyncio.run(outputs(tensor_parallel_size=2, enforce_eager=eager))
    one = asyncio.run(outputs())
    assert [o.outputs for o in two] == [o.outputs for o in one]
    reference = Reference(model)
    reference.check(prompts[4], two[4].outputs[0].token_ids)
