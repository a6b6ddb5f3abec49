"""Rung 0: the whole engine on the NPU device, whose operators are the reference kernels on a CPU.

The first load is the one of the CPU's own matrix, whose blocks are smaller than an NPU's; the
second keeps every documented rule: blocks of 128 tokens, heads of 128.
"""

import asyncio

import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor import SamplingParams
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.options import DeviceOptions
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.engine.test_matrix import MATRIX, covering, loads, run
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.npu.emulation import HostRuntime, emulate, emulate_everywhere, relaxed

pytestmark = pytest.mark.drawn(2)

__all__ = ["loads"]

COVERED = sorted(covering(CONFIGURATIONS), key=str)
# With every layout, half of the schedules run as graphs.
VARIANTS = [(layout, mode) for layout in ("tnd", "bnsd") for mode in ("npugraph", "eager")]


def variant(schedule):
    return VARIANTS[(MATRIX.index(schedule) // 2 + MATRIX.index(schedule) // 30) % len(VARIANTS)]


def chosen(schedule):
    """In every run of the suite: each model, budget and variant with each other, or nearly."""
    return COVERED.index(schedule) % 8 == 1


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=() if chosen(s) else pytest.mark.long, id=str(s)) for s in COVERED],
)
def test_every_schedule_gives_the_cpus_tokens(loads, monkeypatch, schedule):
    name, budget, depth, lead = schedule
    layout, mode = variant(schedule)
    load = loads(name)
    opened = emulate(monkeypatch, any_block=True)
    changes = dict(device="npu", attention_layout=layout, graph_mode=mode, placement="single")
    with relaxed():
        figures = asyncio.run(run(load, budget, depth, lead, **changes))
    assert figures["aborted"] == figures["cut_short"] == len(load.given_up)
    replayed = [kind for kind, _ in opened[-1].runtime.log].count("replay")
    assert (replayed > 50) == (mode == "npugraph")


def test_what_runs_each_time_has_every_variant_with_every_budget():
    found = {(variant(s), s[1]) for s in COVERED if chosen(s)}
    assert {v for v, _ in found} == set(VARIANTS)
    assert len({b for _, b in found}) == 5


# -- under every documented rule ---------------------------------------------------------------

BLOCK = 128


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two layers with heads of 128, as real models have."""
    directory = tmp_path_factory.mktemp("wide")
    changes = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    model = make_checkpoint(directory, max_position_embeddings=1024, **changes)
    return directory, Reference(model)


def kinds(number, tokens):
    """Greedy, drawn from everything, cut by the operator and cut by our own formulas, and under the
    request's own rules."""
    kind = [None, dict(), dict(top_k=20, top_p=0.9), dict(top_p=0.8, min_p=0.02), dict(top_k=200)]
    kind.append(dict(repetition_penalty=1.3, frequency_penalty=0.7, logit_bias={7: 3.0}))
    chosen = kind[number % len(kind)]
    if chosen is None:
        return greedy(tokens)
    return SamplingParams.for_model(
        temperature=0.9, seed=number, max_tokens=tokens, ignore_eos=True, **chosen
    )


@pytest.mark.parametrize(("layout", "mode"), VARIANTS)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 2])
def test_long_sequences_under_all_rules(wide, monkeypatch, layout, mode, depth):
    """Prefixes shared over blocks of 128, prompts in chunks, too little cache, padded buckets."""
    directory, reference = wide
    opened = emulate(monkeypatch)
    stem = ragged_prompts(211, [290], seed=1)[0]
    ends = [130, 256, 257, 290]
    prompts = [stem, *([*stem[:end], end % 211, 5] for end in ends)]
    prompts += ragged_prompts(211, [7, 140, 128], seed=2)
    growing = ragged_prompts(211, [124, 125, 126, 123, 127], seed=4)  # together, into new blocks

    async def outputs(**changes):
        limits = dict(max_num_seqs=5, max_num_batched_tokens=160, max_model_len=384)
        changes |= dict(placement="single", pipeline_depth=depth, **limits)
        async with engine(directory, **changes) as llm:
            await collect(llm, ids(stem), greedy(2))
            found = await asyncio.gather(
                *(collect(llm, ids(p), kinds(i, 9 + i)) for i, p in enumerate(prompts))
            )
            found += await asyncio.gather(
                *(collect(llm, ids(p), kinds(i, 12)) for i, p in enumerate(growing))
            )
            return [o.outputs[0] for o in found], await llm.statistics()

    changes = dict(device="npu", num_kv_blocks=5, graph_mode=mode, attention_layout=layout)
    found, figures = asyncio.run(outputs(**changes))
    scheduler = figures["scheduler"]["actor"]
    assert scheduler["mixed_steps"] > 0
    assert scheduler["preemptions"] > 0
    assert figures["blocks"]["actor"]["hit_tokens"] >= BLOCK
    assert figures["runner.0"]["actor"]["steps_uncaptured"] == 0
    assert opened[-1].graph_mode == mode
    expected, _ = asyncio.run(outputs(device="cpu", num_kv_blocks=200))
    for number, prompt in enumerate(prompts):
        if kinds(number, 1).temperature == 0:
            reference.check(prompt, found[number].token_ids)
    assert found == expected


def scores(output):
    """All that is told of the prompt's tokens and of every answer's."""
    answers = [place for answer in output.outputs for place in answer.logprobs]
    return [*output.prompt_logprobs[1:], *answers]


@pytest.mark.parametrize(("layout", "mode"), VARIANTS)
def test_answers_and_log_probabilities_behind_the_graph(wide, monkeypatch, layout, mode):
    """Several answers begin as copies of blocks of 128; tokens and prompts are scored."""
    directory, _ = wide
    emulate(monkeypatch)
    prompts = ragged_prompts(211, [130, 128, 9], seed=3)

    async def outputs(**changes):
        limits = dict(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=384)
        async with engine(directory, placement="single", **limits, **changes) as llm:
            asked = [
                SamplingParams.for_model(
                    temperature=0.9, seed=n, max_tokens=9, n=3, logprobs=2, prompt_logprobs=n
                )
                for n in range(len(prompts))
            ]
            requests = zip(prompts, asked, strict=True)
            return await asyncio.gather(*(collect(llm, ids(p), how) for p, how in requests))

    changes = dict(device="npu", num_kv_blocks=9, graph_mode=mode, attention_layout=layout)
    found = asyncio.run(outputs(**changes))
    expected = asyncio.run(outputs(device="cpu", num_kv_blocks=200))
    for one, other in zip(found, expected, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
        for mine, theirs in zip(scores(one), scores(other), strict=True):
            values = {token: logprob.logprob for token, logprob in theirs.items()}
            assert {t: e.logprob for t, e in mine.items()} == pytest.approx(values, abs=1e-4)


def test_buckets_that_cannot_be_recorded_fall_back(wide, monkeypatch, caplog):
    """To the next larger one, or to operators one by one; said once, and counted."""
    directory, _ = wide
    refused = {5}
    original = HostRuntime.record

    def record(self, function):
        rows = len(function.args[-1].decode_contexts)
        if rows in refused:
            raise RuntimeError("error code 207008: no stream is left")
        return original(self, function)

    monkeypatch.setattr(HostRuntime, "record", record)
    emulate(monkeypatch)
    prompts = ragged_prompts(211, [5, 9, 20, 3, 8], seed=3)

    async def outputs(**changes):
        changes |= dict(max_num_seqs=5, max_model_len=256, num_kv_blocks=40, placement="single")
        async with engine(directory, **changes) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(8)) for p in prompts))
            return [o.outputs[0] for o in found], await llm.statistics()

    found, figures = asyncio.run(outputs(device="npu"))
    assert found == asyncio.run(outputs(device="cpu"))[0]
    assert 0 < figures["runner.0"]["actor"]["steps_uncaptured"] < 20
    warnings = [r for r in caplog.records if "cannot be captured" in r.getMessage()]
    assert len(warnings) == 1
    assert "207008" in warnings[0].getMessage()
    refused |= {1, 2, 4}
    caplog.clear()
    found, figures = asyncio.run(outputs(device="npu"))
    assert found == asyncio.run(outputs(device="cpu"))[0]
    assert figures["runner.0"]["actor"]["steps_uncaptured"] >= 7, "each decode step"
    assert len([r for r in caplog.records if "cannot be captured" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    ("layout", "mode"), [("tnd", "npugraph"), pytest.param("bnsd", "eager", marks=pytest.mark.long)]
)
def test_two_ranks_give_the_tokens_of_one(wide, monkeypatch, layout, mode):
    """Each in a process of its own, over gloo."""
    emulate_everywhere(monkeypatch, "tests.npu.emulation:HostRuntime")
    prompts = ragged_prompts(211, [5, 130, 9, 127], seed=7)

    async def outputs(**changes):
        changes |= dict(max_num_seqs=3, max_num_batched_tokens=90, max_model_len=256)
        async with engine(wide[0], **changes) as llm:
            found = await asyncio.gather(
                *(collect(llm, ids(p), kinds(i, 8)) for i, p in enumerate(prompts))
            )
            return [o.outputs[0] for o in found]

    options = dict(device="npu", num_kv_blocks=6, attention_layout=layout, graph_mode=mode)
    found = asyncio.run(outputs(tensor_parallel_size=2, **options))
    assert found == asyncio.run(outputs(device="cpu"))


def test_what_one_rank_cannot_record_none_replays(wide, monkeypatch):
    """Else one would pad to another size, and sums would not fit together."""
    emulate_everywhere(monkeypatch, "tests.npu.emulation:Unwilling")
    prompts = ragged_prompts(211, [5, 20], seed=8)

    async def outputs(**changes):
        changes |= dict(max_num_seqs=3, max_model_len=128)
        async with engine(wide[0], **changes) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(8)) for p in prompts))
            return [o.outputs[0] for o in found]

    found = asyncio.run(outputs(device="npu", num_kv_blocks=6, tensor_parallel_size=2))
    assert found == asyncio.run(outputs(device="cpu"))


def test_weights_in_blocks_give_the_same_tokens(wide, monkeypatch):
    """Every projection is cast, once; the embedding is not."""
    emulate(monkeypatch)
    casts = []
    original = HostRuntime.to_fractal

    def cast(self, weight):
        casts.append(tuple(weight.shape))
        return original(self, weight)

    monkeypatch.setattr(HostRuntime, "to_fractal", cast)
    prompts = ragged_prompts(211, [5, 20], seed=8)

    async def outputs(**changes):
        changes |= dict(device="npu", dtype="bfloat16", num_kv_blocks=6, max_model_len=128)
        async with engine(wide[0], placement="single", max_num_seqs=2, **changes) as llm:
            found = await asyncio.gather(*(collect(llm, ids(p), greedy(8)) for p in prompts))
            return [o.outputs[0] for o in found]

    found = asyncio.run(outputs(weight_format="nz"))
    assert len(casts) == 2 * 4 + 1, "two layers and the head"
    assert found == asyncio.run(outputs())
    assert len(casts) == 2 * 4 + 1


def test_min_p_cuts_behind_the_operators_top_p(wide, monkeypatch):
    emulate(monkeypatch)
    prompt = ragged_prompts(211, [5], seed=9)[0]

    def params(min_p, seed):
        kind = dict(temperature=3.0, top_p=0.999, min_p=min_p, seed=seed)
        return SamplingParams.for_model(max_tokens=12, ignore_eos=True, **kind)

    async def outputs(**changes):
        async with engine(wide[0], placement="single", max_model_len=128, **changes) as llm:
            kinds = [params(min_p, seed) for seed in range(4) for min_p in (0.0, 0.5)]
            found = await asyncio.gather(*(collect(llm, ids(prompt), kind) for kind in kinds))
            return [o.outputs[0].token_ids for o in found]

    found = asyncio.run(outputs(device="npu", num_kv_blocks=20))
    assert found == asyncio.run(outputs(device="cpu"))
    assert found[::2] != found[1::2], "it changes something"


# -- what an NPU does not take ----------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 64, 100, 192, 640])
def test_block_sizes_that_the_operator_does_not_take_are_refused(wide, monkeypatch, size):
    emulate(monkeypatch)

    async def start():
        async with engine(wide[0], device="npu", block_size=size, placement="single"):
            raise AssertionError

    with pytest.raises(
        UnsupportedModel, match=f"block_size {size} .* multiple of 128 that is at most 512"
    ):
        asyncio.run(start())


def test_heads_that_packed_attention_does_not_take_are_refused(monkeypatch, tmp_path):
    make_checkpoint(tmp_path, head_dim=80)
    emulate(monkeypatch)

    async def start(**changes):
        async with engine(tmp_path, device="npu", placement="single", **changes) as llm:
            return await collect(llm, ids([1, 2]), greedy(3))

    refused = "head_dim of 64, 128, 192, .* is 80; use attention_layout 'bnsd'"
    with pytest.raises(UnsupportedModel, match=refused):
        asyncio.run(start())
    with relaxed():
        assert len(asyncio.run(start(attention_layout="bnsd")).outputs[0].token_ids) == 3


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_graph_cache_that_cannot_be_written_is_refused(wide, monkeypatch, tmp_path, mode):
    emulate(monkeypatch)
    (tmp_path / "file").write_text("")

    async def start(path):
        options = dict(graph_mode=mode, graph_cache_dir=str(path), placement="single")
        async with engine(wide[0], device="npu", **options):
            raise AssertionError

    with pytest.raises(UnsupportedModel, match="graph_cache_dir .*file cannot be created"):
        asyncio.run(start(tmp_path / "file"))


def test_types_that_the_operator_does_not_take_are_refused(wide, monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(HostRuntime, "supports", lambda self, dtype: dtype == torch.float16)
    monkeypatch.setattr(HostRuntime, "default_dtype", torch.float16)

    async def start():
        async with engine(wide[0], device="npu", dtype="bfloat16", placement="single"):
            raise AssertionError

    with pytest.raises(
        UnsupportedModel, match="does not support fused attention in bfloat16; use dtype float1"
    ):
        asyncio.run(start())


def test_without_torch_npu_the_error_says_what_to_install():
    with pytest.raises(UnsupportedModel, match=r"pip install '\.\[npu\]'"):
        devices.open_device("npu", 0, DeviceOptions())
