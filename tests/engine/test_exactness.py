"""Greedy tokens equal transformers' on the same weights, for every model and schedule."""

import asyncio
import random

import pytest

from nanoactor.errors import ComputationFailed, InvalidConfig, InvalidRequest
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.engine.schedules import schedules
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint

# To the engine they are what others are: Llama, and a mixture of experts.
LATER = {"mistral", "qwen3_vl_moe", "qwen3_moe_fp8"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.long if name in LATER else ())
        for name in CONFIGURATIONS
    ],
)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, Reference(make_checkpoint(directory, **CONFIGURATIONS[request.param]))


@schedules("token by token", "small chunks", "late", "preempted")
def test_greedy_tokens_equal_transformers(checkpoint, schedule):
    directory, reference = checkpoint
    seqs = schedule.changes.get("max_num_seqs", 32)
    rng = random.Random(seqs)
    lengths = [rng.choice([1, 2, 15, 16, 17, 31, 40, 70]) for _ in range(min(32, 3 * seqs))]
    prompts = ragged_prompts(211, lengths, seed=seqs)
    (stem,) = ragged_prompts(211, [40], seed=9)
    for number in range(1, len(prompts), 2):  # every second one begins as others do
        prompts[number] = stem[: 8 + number % 9 * 4] + prompts[number][: number + 1]
    amounts = [25 if number % 2 else rng.choice([1, 2, 9, 20]) for number in range(len(prompts))]

    async def main():
        async with engine(directory, **schedule.changes) as llm:
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
    schedule.check(figures)
    assert (sum(output.num_preemptions for output in outputs) > 0) == schedule.preempts
    assert (figures["scheduler"]["actor"]["mixed_steps"] > 0) == (seqs > 1)
    if schedule.preempts:
        assert figures["blocks"]["actor"]["hit_tokens"] > 0
        assert figures["blocks"]["actor"]["evictions"] > 0


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


def test_sequences_of_mistral_end_at_its_window(tmp_path):
    """A longer one would need a mask that is not there. At the window, transformers agrees."""
    model = make_checkpoint(tmp_path, **CONFIGURATIONS["mistral"] | dict(sliding_window=48))
    (prompt,) = ragged_prompts(211, [30], seed=1)

    async def main(tokens=18, **changes):
        async with engine(tmp_path, block_size=4, num_kv_blocks=16, **changes) as llm:
            return await collect(llm, ids(prompt), greedy(tokens))

    (answer,) = asyncio.run(main()).outputs
    assert len(answer.token_ids) == 18
    Reference(model).check(prompt, answer.token_ids)
    with pytest.raises(InvalidRequest, match="48"):
        asyncio.run(main(tokens=19))
    with pytest.raises(InvalidConfig, match=r"max_model_len 49 exceeds 48.*sliding_window"):
        asyncio.run(main(max_model_len=49))
