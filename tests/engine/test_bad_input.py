"""Each bad input is a typed error that names the cause; the engine goes on serving others."""

import asyncio
import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import nanoactor.models.devices as devices
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import EngineOverloaded, InvalidRequest
from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.protocols import Memory
from nanoactor.models.errors import (
    ModelError,
    NotEnoughMemory,
    UnsupportedModel,
    WeightsError,
)
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.headers import requested_bytes
from nanoactor.models.weights.random_weights import RandomWeights
from nanoactor.requests.params import TokenCap
from nanoactor.runner.config import MemoryNeeds, check_weights
from nanoactor.runner.model import model
from nanoactor.runner.open import open_executor
from tests.conftest import children
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy, ids, rank_config
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint

BAD = [
    (ids([]), {}, "empty"),
    (ids([1, 2048]), {}, "2048 is outside the vocabulary of 2048"),
    (ids([1] * 1024), {}, "1024 tokens, but max_model_len is 1024, so it may have at most 1023"),
    (ids([1] * 1000), dict(max_tokens=25), "max_tokens is 25.*leaves room for only 24"),
    (ids([1] * 1000), dict(min_tokens=25), "min_tokens is 25.*leaves room for only 24"),
    ("", {}, "empty"),
    ("word " * 2000, {}, "tokens, but max_model_len is 1024"),
    ("x" * 70_000, {}, "bytes"),
    ([{"role": "tool"}], {}, "chat template rejects"),
    ("a", dict(stop_token_ids=[5000]), "5000, which is outside the vocabulary"),
]


def test_bad_requests_are_refused_one_by_one_while_others_run(demo):
    async def main():
        async with engine(DEMO, skip_tokenizer_init=False, max_num_seqs=8) as llm:
            others = [asyncio.ensure_future(collect(llm, "ROMEO:", greedy(80))) for _ in range(3)]
            for prompt, params, text in BAD:
                with pytest.raises(InvalidRequest, match=text):
                    await collect(llm, prompt, SamplingParams.for_model(**params))
            bad = [llm.generate("word " * 2000) for _ in range(20)]
            results = await asyncio.gather(*(anext(b) for b in bad), return_exceptions=True)
            assert all(isinstance(result, InvalidRequest) for result in results)
            return await asyncio.gather(*others)

    for output in asyncio.run(main()):
        demo.check(output.prompt_token_ids, output.outputs[0].token_ids)
    demo.conclude()


def test_a_cap_is_lowered_to_what_the_context_leaves():
    async def main():
        async with engine(DEMO, max_num_seqs=8) as llm:
            params = SamplingParams(max_tokens=TokenCap(10**6), ignore_eos=True, temperature=0)
            output = await collect(llm, ids([1] * 1000), params)
            assert len(output.outputs[0].token_ids) == 24
            assert output.outputs[0].finish_reason == "length"
            with pytest.raises(InvalidRequest, match="min_tokens is 25.*leaves room for only 24"):
                await collect(llm, ids([1] * 1000), dataclasses.replace(params, min_tokens=25))
            with pytest.raises(InvalidRequest, match="max_model_len is 1024"):
                await collect(llm, ids([1] * 1024), params)

    asyncio.run(main())


def test_nothing_in_a_prompt_ends_the_engine():
    """What only fails in the tokenizer's process comes back as that request's error."""

    async def main():
        options = dict(placement="default", skip_tokenizer_init=False, max_num_seqs=4)
        async with engine(DEMO, **options) as llm:
            llm._requests._encode_json = lambda name, value: (
                "[" * 100_000 if name == "messages" else "{}"
            )
            with pytest.raises(InvalidRequest, match="cannot be tokenized"):
                await collect(llm, [{"role": "user", "content": "x"}])
            assert (await collect(llm, "ROMEO:", greedy(3))).finished

    asyncio.run(main())


def test_refused_requests_take_no_numbers():
    async def main():
        async with engine(DEMO, placement="single", max_waiting_tokens=20, max_num_seqs=1) as llm:
            for _ in range(5):
                results = await asyncio.gather(
                    *(collect(llm, ids([1] * 15), greedy(2)) for _ in range(4)),
                    return_exceptions=True,
                )
                assert any(isinstance(result, EngineOverloaded) for result in results)
            scheduler = llm._system.actor("scheduler")._scheduler
            assert len(scheduler.arrivals.seen) == 0

    asyncio.run(main())


def test_an_engine_without_a_tokenizer_refuses_what_needs_one():
    async def main():
        async with engine(DEMO, placement="single") as llm:
            for prompt, params in [("text", {}), (ids([1]), dict(stop="x"))]:
                with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
                    await collect(llm, prompt, SamplingParams.for_model(**params))
            output = await collect(llm, ids([1, 2]), greedy(5))
            assert output.outputs[0].text == ""
            assert len(output.outputs[0].token_ids) == 5

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (dict(max_waiting_requests=3), "3 requests are already waiting"),
        (dict(max_waiting_tokens=40), "tokens are already waiting"),
    ],
)
def test_a_full_queue_refuses_at_the_door_and_recovers(bound, text):
    async def main():
        async with engine(DEMO, placement="single", max_num_seqs=1, **bound) as llm:
            requests = [collect(llm, ids([1] * 15), greedy(10)) for _ in range(8)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            refused = [r for r in results if isinstance(r, Exception)]
            assert 0 < len(refused) < 8
            assert all(isinstance(r, EngineOverloaded) for r in refused)
            assert text in str(refused[0])
            assert (await collect(llm, ids([1]), greedy(3))).finished

    asyncio.run(main())


@pytest.fixture
def copy(tmp_path):
    """A copy of the demo model to damage, and a way to change its configuration."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("*.py", "*.xz", "__pycache__"))

    def change(**values):
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        return directory

    return change


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGES = [
    (dict(), lambda d: (d / "model.safetensors").unlink(), WeightsError, "no .safetensors file"),
    (dict(), truncate, WeightsError, "model.safetensors is damaged or incomplete"),
    (dict(intermediate_size=641), None, WeightsError, r"gate_proj.*\(640, 256\).*\(641, 256\)"),
    (dict(tie_word_embeddings=False), None, WeightsError, "no weight 'lm_head.weight'"),
    (
        dict(architectures=["GemmaForCausalLM"]),
        None,
        UnsupportedModel,
        "GemmaForCausalLM.*Qwen3",
    ),
    (
        dict(),
        lambda d: (d / "config.json").unlink(),
        ModelError,
        "contains weights but no config.json",
    ),
    (dict(), lambda d: (d / "tokenizer.json").unlink(), ModelError, "no tokenizer.json"),
    (
        dict(),
        lambda d: (d / "tokenizer.json").write_text("{}"),
        ModelError,
        "not a valid tokenizer",
    ),
]


@pytest.mark.parametrize(
    ("changes", "damage", "error", "text", "placement"),
    # Elsewhere: what the user's process finds, what the runner does, and what the tokenizer does.
    [
        *((*damage, "single") for damage in DAMAGES),
        *((*DAMAGES[number], "default") for number in (0, 4, 7)),
    ],
)
def test_a_broken_model_is_named_when_the_engine_starts(
    copy, changes, damage, error, text, placement
):
    directory = copy(**changes)
    if damage:
        damage(directory)

    async def main():
        async with AsyncLLM(str(directory), placement=placement, max_num_seqs=4):
            pass

    with pytest.raises(error, match=text):
        asyncio.run(main())
    assert not children()


def test_too_small_a_cache_is_refused_with_the_arithmetic():
    async def main(**options):
        values = {"placement": "single", "max_model_len": 1024, **options}
        async with AsyncLLM("demo", **values):
            pass

    with pytest.raises(
        NotEnoughMemory, match="63 blocks of 16.*needs 64 blocks; lower max_model_len"
    ):
        asyncio.run(main(num_kv_blocks=63))
    with pytest.raises(NotEnoughMemory, match=r"take at least .* may use 0% of .* MiB free \(mem"):
        asyncio.run(main(memory_utilization=1e-6))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("weights", "free", "share", "ranks", "shared", "word"),
    [
        (15000, 16000, 1.0, 1, False, None),
        (15000, 15600, 1.0, 1, False, None),
        (15000, 15500, 1.0, 1, False, "512 tokens takes 512 MiB.* max_model_len 500 might fit"),
        (15000, 16000, 0.9, 1, False, "15000 MiB of each device.* may use 90% of 16000 MiB free"),
        (15000, 14000, 1.0, 1, False, "15000 MiB of each device.*14000 MiB free"),
        (15000, 14000, 1.0, 1, False, "tensor_parallel_size 2, the weights would take 7500 MiB"),
        (15000, 7400, 1.0, 2, False, "7500 MiB of each device.*tensor_parallel_size 4, the w"),
        (15000, 7800, 1.0, 2, False, None),
        (15000, 14000, 1.0, 4, True, "15000 MiB of this machine.* 512 MiB; .*14000 MiB free"),
        (15000, 16000, 1.0, 4, True, None),
        (15000, 16000, 0.9, 4, True, "15000 MiB of this machine.* 90% of 16000 MiB free"),
    ],
)
def test_weights_that_cannot_fit_are_refused_with_the_arithmetic(
    weights, free, share, ranks, shared, word
):
    def check():
        needs = MemoryNeeds(weights * MIB, "bfloat16", MIB, 512)
        check_weights(needs, free * MIB, share, ranks, shared=shared)

    if word is None:
        check()
        return
    with pytest.raises(NotEnoughMemory, match=word) as raised:
        check()
    assert shared == ("tensor_parallel_size" not in str(raised.value))


@pytest.mark.parametrize(
    ("kind", "weights_format"),
    [(CompiledCPUDevice, "float32 or packed"), (CPUDevice, "float32, unpacked on this device,")],
)
def test_packed_weights_count_as_the_device_uses_them(monkeypatch, tmp_path, kind, weights_format):
    make_checkpoint(tmp_path, **CONFIGURATIONS["fp8"])
    found = []

    def noted(*arguments, **options):
        found.append(requested_bytes(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(model, "requested_bytes", noted)
    monkeypatch.setattr(devices, "open_device", lambda *_: kind())
    monkeypatch.setattr(CPUDevice, "memory", lambda _: Memory(1 << 34, 1 << 10))
    with pytest.raises(NotEnoughMemory, match=f"the weights in {weights_format} take at least"):
        open_executor(rank_config(tmp_path, device="cpu", dtype="float32"))
    tensors = load_file(tmp_path / "model.safetensors")
    packed = [t.numel() for t in tensors.values() if t.dtype == torch.float8_e4m3fn]
    others = [t.numel() for t in tensors.values() if t.dtype != torch.float8_e4m3fn]
    each = 1 if kind is CompiledCPUDevice else 4
    assert found == [each * sum(packed) + 4 * sum(others)]


@pytest.mark.parametrize("configuration", ["untied", "qwen3_moe_fp8", "qwen3_vl"])
def test_random_weights_that_cannot_fit_are_refused_before_they_are_created(
    monkeypatch, tmp_path, configuration
):
    make_checkpoint(tmp_path, **CONFIGURATIONS[configuration])
    monkeypatch.setattr(CPUDevice, "memory", lambda _: Memory(1 << 34, 1 << 10))
    monkeypatch.setattr(RandomWeights, "_load", lambda *_: pytest.fail("it is created"))
    needed = []

    def noted(needs, *args, **options):
        needed.append(needs.weights)
        check_weights(needs, *args, **options)

    monkeypatch.setattr(model, "check_weights", noted)
    for load_format in ("dummy", "auto"):
        options = dict(device="cpu", dtype="float32", load_format=load_format)
        with pytest.raises(NotEnoughMemory, match="the weights in float32.* take at least"):
            open_executor(rank_config(tmp_path, **options))
    assert needed[0] == needed[1] > 0


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr(CPUDevice, "memory", lambda _: Memory(1 << 34, 1 << 20))
    monkeypatch.setattr(CheckpointWeights, "_load", lambda *_: pytest.fail("it is loaded"))

    async def main():
        async with AsyncLLM("demo", placement="single"):
            pass

    with pytest.raises(NotEnoughMemory, match="the weights in .*float.* take at least"):
        asyncio.run(main())


def test_unknown_devices_are_refused_with_the_list():
    async def main():
        async with AsyncLLM("demo", placement="single", device="tpu"):
            pass

    with pytest.raises(
        UnsupportedModel, match="'tpu' is not supported; the supported devices are cpu"
    ):
        asyncio.run(main())
