"""Greedy tokens equal transformers' on the same weights, for every batch and chunk size."""

import asyncio
import random

import pytest

from nanoactor import SamplingParams
from nanoactor.errors import ComputationFailed
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint


@pytest.fixture(scope="module", params=list(CONFIGURATIONS))
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, Reference(make_checkpoint(directory, **CONFIGURATIONS[request.param]))


# (sequences at once, tokens a step, depth): the second is the chunk size of prefill.
SHAPES = [
    (1, 1, 1),
    (4, 5, 2),
    pytest.param(32, 64, 2, marks=pytest.mark.long),
    (32, 500, 3),
]


@pytest.mark.parametrize(("seqs", "tokens", "depth"), SHAPES)
def test_greedy_tokens_equal_transformers(checkpoint, seqs, tokens, depth):
    directory, reference = checkpoint
    rng = random.Random(seqs)
    count = min(32, 3 * seqs)
    lengths = [rng.choice([1, 2, 15, 16, 17, 31, 40, 70]) for _ in range(count)]
    prompts = ragged_prompts(211, lengths, seed=tokens)
    amounts = [rng.choice([1, 2, 9, 20]) for _ in prompts]

    async def main():
        changes = dict(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            pipeline_depth=depth,
            placement="single",
        )
        async with engine(directory, **changes) as llm:
            requests = [
                collect(llm, ids(p), greedy(n)) for p, n in zip(prompts, amounts, strict=True)
            ]
            return await asyncio.gather(*requests), await llm.statistics()

    outputs, figures = asyncio.run(main())
    for prompt, amount, output in zip(prompts, amounts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.outputs[0].token_ids) == amount
        assert output.outputs[0].finish_reason == "length"
        reference.check(prompt, output.outputs[0].token_ids)
    reference.conclude()
    if seqs > 1:
        assert figures["scheduler"]["actor"]["mixed_steps"] > 0


def test_preempted_and_cached_sequences_are_exact_too(checkpoint):
    directory, reference = checkpoint
    stem = ragged_prompts(211, [40], seed=9)[0]
    tails = ragged_prompts(211, [1 + i for i in range(12)], seed=8)
    prompts = [stem[: 8 + 4 * (i % 9)] + tail for i, tail in enumerate(tails)]

    async def main():
        changes = dict(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            num_kv_blocks=20,
            block_size=4,
            max_model_len=80,
            placement="single",
        )
        async with engine(directory, **changes) as llm:
            outputs = await asyncio.gather(*(collect(llm, ids(p), greedy(25)) for p in prompts))
            return outputs, await llm.statistics()

    outputs, figures = asyncio.run(main())
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output.outputs[0].token_ids)
    reference.conclude()
    assert figures["scheduler"]["actor"]["preemptions"] > 0
    assert figures["blocks"]["actor"]["hit_tokens"] > 0
    assert figures["blocks"]["actor"]["evictions"] > 0
    assert sum(output.num_preemptions for output in outputs) > 0


def test_a_sampled_token_depends_on_seed_and_position_alone(checkpoint):
    """The same seeds give the same tokens alone, in a batch, chunked, at any depth."""
    directory, _ = checkpoint
    prompts = ragged_prompts(211, [5, 20, 33, 41], seed=3)
    kinds = [dict(), dict(top_k=20), dict(top_p=0.8), dict(top_k=50, top_p=0.9, min_p=0.02)]

    async def run(depth, tokens, together):
        changes = dict(pipeline_depth=depth, max_num_batched_tokens=tokens, max_num_seqs=4)
        async with engine(directory, placement="single", **changes) as llm:
            requests = [
                collect(
                    llm,
                    ids(prompt),
                    SamplingParams.for_model(
                        temperature=0.9, seed=i, max_tokens=12, ignore_eos=True, **kind
                    ),
                )
                for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
            ]
            if together:
                outputs = await asyncio.gather(*requests)
            else:
                outputs = [await request for request in requests]
            return [output.outputs[0].token_ids for output in outputs]

    expected = asyncio.run(run(1, 64, False))
    assert asyncio.run(run(2, 5, True)) == expected
    assert asyncio.run(run(3, 300, True)) == expected
    assert len({tuple(tokens) for tokens in expected}) == 4


@pytest.mark.parametrize(
    ("placement", "depth", "least", "most"),
    [
        ("single", 1, 0.0, 0.0),
        ("single", 2, 0.5, 1.0),
        ("single", 3, 0.5, 1.0),
        # Processes that wait for a busy core come too late for some steps; at depth 1 all do.
        ("default", 2, 0.2, 1.0),
    ],
)
def test_the_next_step_is_prepared_while_this_one_is_computed(
    tmp_path, placement, depth, least, most
):
    make_checkpoint(tmp_path)

    async def main():
        changes = dict(pipeline_depth=depth, placement=placement, max_num_seqs=4)
        async with engine(tmp_path, **changes) as llm:
            requests = [collect(llm, ids([1, 2, n]), greedy(100)) for n in range(4)]
            await asyncio.gather(*requests)
            return (await llm.statistics())["runner.0"]["actor"]

    figures = asyncio.run(main())
    assert figures["steps"] >= 100
    assert least <= figures["ahead"] / figures["steps"] <= most


def test_a_sequence_that_diverges_harms_no_other(tmp_path):
    """Its NaN must not reach whoever shares a step with it or gets its blocks next."""
    import torch
    from safetensors.torch import load_file, save_file

    reference = Reference(make_checkpoint(tmp_path))
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    prompts = [[t if t != 5 else 6 for t in p] for p in ragged_prompts(211, [9, 30, 17], seed=2)]

    async def main():
        changes = dict(num_kv_blocks=24, max_num_seqs=4, max_model_len=64, placement="single")
        changes |= dict(enable_prefix_caching=False, check_weights=False)
        async with engine(tmp_path, block_size=4, **changes) as llm:
            outputs = []
            for _ in range(3):
                bad = asyncio.ensure_future(collect(llm, ids([5] * 40), greedy(10)))
                outputs += await asyncio.gather(
                    *(collect(llm, ids(p), greedy(20)) for p in prompts), return_exceptions=True
                )
                with pytest.raises(ComputationFailed):
                    await bad
            return outputs

    for prompt, output in zip(prompts * 3, asyncio.run(main()), strict=True):
        if not isinstance(output, ComputationFailed):  # it may choose that token itself
            reference.check(prompt, output.outputs[0].token_ids)
    reference.conclude()
