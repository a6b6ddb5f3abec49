"""Rung 0: images and videos on the NPU device, whose operators are the reference kernels."""

import asyncio

import pytest
import torch

from nanoactor import LLM, SamplingParams
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.options import DeviceOptions
from tests.engine import test_video
from tests.engine.harness import collect, engine, greedy
from tests.engine.test_vision import Eyes, check_all, conversation, drawn, jobs_of, run_all
from tests.npu.emulation import HostRuntime, emulate, emulate_everywhere, relaxed


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return Eyes(tmp_path_factory.mktemp("eyes"), num_hidden_layers=4)


# Every chunk ends in an image, which is encoded in parts; or images, text and decode rows mix.
@pytest.mark.parametrize(
    ("layout", "mode", "budget"),
    [
        ("tnd", "npugraph", 3),
        pytest.param("bnsd", "eager", 17, marks=pytest.mark.long),
        pytest.param("bnsd", "npugraph", 64, marks=pytest.mark.long),
        pytest.param("tnd", "eager", 3, marks=pytest.mark.long),
    ],
)
def test_tokens_equal_transformers(eyes, monkeypatch, layout, mode, budget):
    jobs = jobs_of(budget, 5)
    opened = emulate(monkeypatch, any_block=True)
    changes = dict(device="npu", attention_layout=layout, graph_mode=mode, placement="single")
    changes |= dict(max_num_seqs=3, max_num_batched_tokens=budget, block_size=4)

    async def main():
        async with engine(eyes.directory, **changes) as llm:
            return await run_all(llm, jobs, 5)

    with relaxed():
        check_all(eyes, jobs, asyncio.run(main()), 5)
    replayed = [kind for kind, _ in opened[-1].runtime.log].count("replay")
    assert (replayed > 0) == (mode == "npugraph")


def test_the_operator_gets_no_more_segments_than_it_takes():
    device = NPUDevice(HostRuntime(), DeviceOptions())
    q, k, v = torch.randn(3, 2500, 2, 16).unbind()
    found = device.segment_attention(q, k, v, [2, *[1] * 2496, 2])
    assert torch.equal(found[2:-2], v[2:-2])
    expected = device.segment_attention(q[-2:], k[-2:], v[-2:], [2])
    assert torch.equal(found[-2:], expected)


def test_videos_too(tmp_path, monkeypatch):
    viewer, jobs = test_video.Viewer(tmp_path), test_video.jobs_of(5, 4)
    emulate(monkeypatch, any_block=True)
    changes = dict(device="npu", placement="single", skip_tokenizer_init=False, block_size=4)
    changes |= dict(max_num_seqs=4, max_num_batched_tokens=24)

    async def main():
        async with engine(viewer.directory, **changes) as llm:
            requests = (test_video.request(*job) for job in jobs)
            return await asyncio.gather(*(collect(llm, each, greedy(4)) for each in requests))

    with relaxed():
        outputs = asyncio.run(main())
    for (_, images, videos), output in zip(jobs, outputs, strict=True):
        viewer.see(output.prompt_token_ids, output.outputs[0].token_ids, images, videos)
    viewer.conclude()


@pytest.mark.long
def test_ranks_see_as_one(tmp_path, monkeypatch):
    rope = dict(rope_type="default", rope_theta=5e4, mrope_section=[8, 4, 4])
    eyes = Eyes(tmp_path, num_hidden_layers=4, head_dim=32, rope_parameters=rope)
    emulate_everywhere(monkeypatch, "tests.npu.emulation:HostRuntime")
    jobs = jobs_of(5, 4)

    async def main():
        changes = dict(device="npu", tensor_parallel_size=2, attention_layout="bnsd")
        async with engine(eyes.directory, max_num_batched_tokens=40, **changes) as llm:
            return await run_all(llm, jobs, 4)

    check_all(eyes, jobs, asyncio.run(main()), 4)


@pytest.mark.long
def test_the_demo_reads_digits(monkeypatch):
    """Under every documented rule but that on the size of its heads."""
    emulate(monkeypatch)
    params = SamplingParams.for_model(temperature=0.0, max_tokens=8)
    options = dict(device="npu", dtype="float32", attention_layout="bnsd", placement="single")
    numbers = ["7", "42", "905"]
    with LLM("demo-vl", num_kv_blocks=24, max_num_seqs=4, **options) as llm:
        chats = [conversation("read: ", drawn(number)) for number in numbers]
        answers = llm.chat(chats, params, use_tqdm=False)
    assert [answer.outputs[0].text for answer in answers] == numbers
