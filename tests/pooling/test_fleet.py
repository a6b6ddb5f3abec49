"""Vectors of a fleet are those of one engine, whoever dies."""

import asyncio

import numpy as np
import pytest

from nanoactor import InvalidRequest, PoolingParams
from tests.engine.harness import on_a_loop
from tests.fleet.local import fleet


@on_a_loop
async def test_vectors_move_when_a_replica_dies():
    async with fleet(2, silence=2.0, pooling="mean") as (llm, local, engines):
        texts = [f"text {number} " * (1 + number % 30) for number in range(120)]
        own = [(await engines[0].embed(text)).outputs.embedding for text in texts[:30]]
        tasks = [asyncio.ensure_future(llm.embed(text)) for text in texts]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await local.replace(sorted(local.members)[0])
        found = await asyncio.gather(*tasks)
        for output, right in zip(found, own, strict=False):
            assert np.allclose(output.outputs.embedding, right, atol=1e-5)
        assert not llm.fleet.counts.lost
        score = await llm.score(texts[3], texts[3])
        assert score.outputs.score == pytest.approx(1, abs=1e-5)
        with pytest.raises(InvalidRequest, match="dimensions is 1000"):
            await llm.embed("x", PoolingParams(dimensions=1000))
        assert llm.live == 0
