"""Rung 0: vectors on the NPU device, whose operators are the reference kernels on a CPU."""

import asyncio

import pytest

from nanoactor import PoolingParams
from tests.engine.harness import collect, engine, greedy, ids, ragged_prompts
from tests.models.checkpoints import make_checkpoint
from tests.npu.emulation import emulate, relaxed
from tests.pooling.test_exactness import check


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("mode", ["npugraph", "eager"])
def test_vectors_beside_streams(tmp_path, monkeypatch, kind, mode):
    emulate(monkeypatch, any_block=True)
    model = make_checkpoint(tmp_path)
    prompts = ragged_prompts(211, (3, 40, 17, 66), seed=2)
    changes = dict(device="npu", graph_mode=mode, placement="single", block_size=8)

    async def main():
        async with engine(tmp_path, pooling=kind, max_num_batched_tokens=32, **changes) as llm:
            stream = asyncio.ensure_future(collect(llm, ids([5, 6, 7]), greedy(30)))
            raw = PoolingParams(normalize=False)
            found = await asyncio.gather(*(llm.embed(ids(prompt), raw) for prompt in prompts))
            await stream
            for prompt, output in zip(prompts, found, strict=True):
                check(model.model, prompt, kind, output)

    with relaxed():
        asyncio.run(main())
