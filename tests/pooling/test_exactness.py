"""Vectors are those of transformers' decoder, under every schedule."""

import asyncio

import numpy as np
import pytest
import torch

from nanoactor import AsyncLLM, InvalidRequest, PoolingParams, SamplingParams
from tests.engine.harness import collect, engine, ids, on_a_loop, options, ragged_prompts, settled
from tests.engine.schedules import schedules
from tests.models.checkpoints import make_checkpoint
from tests.pooling.checkpoints import make_embedder

RAW = PoolingParams(normalize=False)
LENGTHS = (1, 2, 3, 7, 24, 40, 66, 90)
LONGEST = 99
MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


@pytest.fixture(scope="module")
def embedders(tmp_path_factory):
    """By kind of pooling: the directory of a model, and transformers' decoder."""
    made = {}
    for kind, mode in MODES.items():
        directory = tmp_path_factory.mktemp(kind)
        made[kind] = directory, make_embedder(directory, mode)
    return made


def pooled(model, prompt, kind):
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]


def check(model, prompt, kind, output):
    """The vector's numbers, and its direction, are the reference's."""
    right, found = pooled(model, prompt, kind), output.outputs.embedding
    assert output.prompt_token_ids == list(prompt)
    assert np.abs(found - right).max() < 1e-5 * max(1, np.abs(right).max())
    cosine = found @ right / np.linalg.norm(found) / np.linalg.norm(right)
    assert cosine > 1 - 1e-6


@pytest.mark.parametrize("kind", MODES)
@schedules(usual=("token by token", "small chunks", "late", "preempted", "preempted, no cache"))
@on_a_loop
async def test_vectors_are_the_references(embedders, kind, schedule):
    """Beside streams, which make sequences give up their blocks where the cache is tight."""
    directory, model = embedders[kind]
    prompts = ragged_prompts(211, LENGTHS, seed=3) + ragged_prompts(211, LENGTHS[4:], seed=4)
    async with engine(directory, **schedule.changes) as llm:
        rounds = [llm.embed(ids(prompt), RAW) for prompt in prompts]
        for prompt, output in zip(prompts, await asyncio.gather(*rounds), strict=True):
            check(model, prompt, kind, output)


@pytest.mark.parametrize("kind", MODES)
@on_a_loop
async def test_vectors_beside_streams_that_preempt(tmp_path, kind):
    """One model that generates and pools: rows of both kinds in the same steps."""
    model = make_checkpoint(tmp_path)
    tight = dict(num_kv_blocks=25, block_size=4, max_model_len=100, max_num_seqs=6)
    async with engine(tmp_path, pooling=kind, max_num_batched_tokens=16, **tight) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        prompts = ragged_prompts(211, (9, 30, 12, 5), seed=1)
        alone = [await collect(llm, ids(prompt), greedy) for prompt in prompts]
        texts = ragged_prompts(211, (40, 77, 3, 99, 16, 58), seed=2)
        streams = [collect(llm, ids(prompt), greedy) for prompt in prompts]
        vectors = [llm.embed(ids(text), RAW) for text in texts]
        done = await asyncio.gather(*streams, *vectors)
        for before, now in zip(alone, done, strict=False):
            assert now.outputs[0].token_ids == before.outputs[0].token_ids
        for text, output in zip(texts, done[len(streams) :], strict=True):
            check(model.model, text, kind, output)
        figures = await llm.statistics()
        assert figures["scheduler"]["actor"]["preemptions"] > 0


@on_a_loop
async def test_a_prefix_is_computed_once_where_only_the_last_state_counts(embedders):
    computed = {}
    for kind, (directory, model) in embedders.items():
        async with engine(directory, block_size=4) as llm:
            (stem,) = ragged_prompts(211, (64,), seed=5)
            for tail in ([1], [2, 3]):
                output = await llm.embed(ids([*stem, *tail]), RAW)
                check(model, [*stem, *tail], kind, output)
            figures = await llm.statistics()
            computed[kind] = figures["scheduler"]["actor"]["prefill_tokens"]
            assert output.num_cached_tokens == (64 if kind == "last" else 0)
    assert computed == {"last": 65 + 2, "mean": 65 + 66, "cls": 65 + 66}


@on_a_loop
async def test_a_text_may_be_as_long_as_the_context_and_no_longer(embedders):
    directory, model = embedders["last"]
    async with engine(directory, max_model_len=64, num_kv_blocks=8) as llm:
        (prompt,) = ragged_prompts(211, (64,))
        check(model, prompt, "last", await llm.embed(ids(prompt), RAW))
        with pytest.raises(InvalidRequest, match=r"has 65 tokens, but max_model_len is 64"):
            await llm.embed(ids([*prompt, 1]))
        cut = PoolingParams(normalize=False, truncate_prompt_tokens=-1)
        check(model, prompt, "last", await llm.embed(ids([7, *prompt]), cut))


@on_a_loop
async def test_vectors_are_cut_then_normalized(embedders):
    directory, model = embedders["last"]
    async with engine(directory) as llm:
        (prompt,) = ragged_prompts(211, (20,))
        right = pooled(model, prompt, "last")
        for dimensions in (None, 1, 8, len(right)):
            output = await llm.embed(ids(prompt), PoolingParams(dimensions=dimensions))
            cut = right[:dimensions]
            assert np.allclose(output.outputs.embedding, cut / np.linalg.norm(cut), atol=1e-6)
        with pytest.raises(InvalidRequest, match=f"dimensions is {len(right) + 1}"):
            await llm.embed(ids(prompt), PoolingParams(dimensions=len(right) + 1))


@pytest.mark.parametrize("ranks", [1, 2])
@on_a_loop
async def test_a_score_is_the_softmax_of_two_logits(tmp_path, ranks, monkeypatch):
    """By ids: the words of a tokenizer are tested with one."""
    model = make_checkpoint(tmp_path)
    monkeypatch.setattr("nanoactor.model_files.files._judgement_ids", lambda *_: (5, 190))
    changes = dict(tensor_parallel_size=ranks, pooling="yes_no")
    async with AsyncLLM(str(tmp_path), **options(**changes)) as llm:
        for prompt in ragged_prompts(211, (3, 70)):
            request = llm.submit_pooled(ids(prompt), PoolingParams(), scores=True)
            found = await request.vector()
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0, -1, [5, 190]]
            assert np.allclose(found, logits.numpy(), atol=1e-5)
        await settled(llm)


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@pytest.mark.parametrize("bare", [True, False])
@on_a_loop
async def test_other_families_and_names(tmp_path, family, bare):
    model = make_embedder(tmp_path, family=family, bare=bare)
    async with engine(tmp_path) as llm:
        for prompt in ragged_prompts(211, (3, 30)):
            check(model, prompt, "last", await llm.embed(ids(prompt), RAW))


@pytest.mark.drawn(2)
@on_a_loop
async def test_ranks_make_the_same_vectors(embedders):
    for kind, (directory, model) in embedders.items():
        async with engine(directory, tensor_parallel_size=2, max_num_batched_tokens=32) as llm:
            for prompt in ragged_prompts(211, (3, 70)):
                check(model, prompt, kind, await llm.embed(ids(prompt), RAW))
