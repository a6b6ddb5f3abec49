"""The tightest sizes that are allowed: exact answers, exact counts, and everybody gets through."""

import asyncio
import random

import pytest

from nanoactor.errors import InvalidRequest
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts, settled
from tests.models.checkpoints import make_checkpoint

SMALL = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, intermediate_size=48)
TREE, BLOCK = 200, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("narrow")
    return directory, Reference(make_checkpoint(directory, **SMALL))


def run(checkpoint, check, **changes):
    """`check(llm)` on an engine of its own, which must be idle afterwards; returns its figures."""

    async def main():
        async with engine(checkpoint[0], placement="single", **changes) as llm:
            await check(llm)
            return await settled(llm)

    figures = asyncio.run(main())
    return figures["scheduler"]["actor"], figures["blocks"]["actor"]


async def together(llm, requests):
    """The outputs of (prompt, how many tokens), all submitted at once."""
    return await asyncio.gather(*(collect(llm, ids(p), greedy(n)) for p, n in requests))


def check_outputs(reference, requests, outputs):
    """As many tokens as were asked for, and transformers' own; each distinct answer once."""
    answers = set()
    for (prompt, amount), output in zip(requests, outputs, strict=True):
        completion = output.outputs[0]
        assert (len(completion.token_ids), completion.finish_reason) == (amount, "length")
        answers.add((*prompt, -1, *completion.token_ids))
    for answer in answers:
        end = answer.index(-1)
        reference.check(answer[:end], answer[end + 1 :])
    reference.conclude()


@pytest.mark.parametrize(
    ("depth", "caching"),
    [
        (1, False),
        (2, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, True), (2, False)]),
        (3, True),
        pytest.param(3, False, marks=pytest.mark.long),
    ],
)
def test_a_cache_one_block_larger_than_one_sequence_serves_several(checkpoint, depth, caching):
    length, size = 64, 4
    rng = random.Random(depth)
    stem = ragged_prompts(211, [60], seed=depth)[0]
    requests = [([9], length - 1), (stem[:1], length - 1), ([*stem, 1, 2, 3], 1)]
    for tail in ragged_prompts(211, [*range(1, 31)] * 2, seed=depth):
        prompt = stem[: rng.randrange(31)] + tail
        requests.append((prompt, rng.randrange(1, length - len(prompt) + 1)))
    rng.shuffle(requests)

    async def check(llm):
        check_outputs(checkpoint[1], requests, await together(llm, requests))

    scheduler, blocks = run(
        checkpoint,
        check,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        max_model_len=length,
        block_size=size,
        num_kv_blocks=length // size + 1,
        max_num_seqs=6,
        max_num_batched_tokens=16,
    )
    assert scheduler["finished"] == len(requests)
    assert scheduler["preemptions"] > 10
    # At depth 1 nothing is in flight: who starves may always have preempted all others.
    assert scheduler["sat_out"] > 0 or depth == 1
    assert (blocks["hit_tokens"] > 0) == caching


@pytest.mark.parametrize(
    ("depth", "most"),
    [
        (1, 1),
        (3, 5),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 1), (3, 1), (2, 5)]),
    ],
)
def test_a_thousand_sequences_that_begin_with_one_token(checkpoint, depth, most):
    rng = random.Random(most)
    requests = [([number % 211], rng.randrange(1, most + 1)) for number in range(1_000)]

    async def check(llm):
        check_outputs(checkpoint[1], requests, await together(llm, requests))

    scheduler, blocks = run(checkpoint, check, pipeline_depth=depth)
    counted = dict(
        finished=1_000,
        prefill_tokens=1_000,
        decode_tokens=sum(amount - 1 for _, amount in requests),
        overruns=0,
        preemptions=0,
        aborted=0,
    )
    assert {name: scheduler[name] for name in counted} == counted
    assert (blocks["prompt_tokens"], blocks["hit_tokens"]) == (1_000, 0)


def test_the_longest_prompt_gets_one_token_and_one_longer_is_refused_while_others_run(checkpoint):
    length = 64
    longest, other = ragged_prompts(211, [length - 1, 5], seed=4)

    async def check(llm):
        others = asyncio.ensure_future(together(llm, [(other, 58), (other[:2], 58)]))
        await asyncio.sleep(0)
        for _ in range(3):
            check_outputs(checkpoint[1], [(longest, 1)], await together(llm, [(longest, 1)]))
            unlimited = await collect(llm, ids(longest), greedy(None))
            check_outputs(checkpoint[1], [(longest, 1)], [unlimited])
            with pytest.raises(InvalidRequest, match="64 tokens, but max_model_len is 64"):
                llm.generate(ids([*longest, 1]), greedy(1))
            with pytest.raises(InvalidRequest, match="max_tokens is 2, .* room for only 1"):
                await collect(llm, ids(longest), greedy(2))
        assert not others.done()
        check_outputs(checkpoint[1], [(other, 58), (other[:2], 58)], await others)

    scheduler, _ = run(checkpoint, check, max_model_len=length, max_num_batched_tokens=32)
    assert scheduler["finished"] == 8
    assert scheduler["overruns"] == 0


# -- prefixes of prefixes -----------------------------------------------------------------


def chain():
    """Each prompt is the one before and a block more."""
    whole = ragged_prompts(211, [TREE * BLOCK], seed=6)[0]
    return [whole[: depth * BLOCK] for depth in range(1, TREE + 1)]


def tree_options(blocks):
    return dict(
        block_size=BLOCK,
        max_model_len=(TREE + 4) * BLOCK,
        num_kv_blocks=blocks,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )


def test_each_prompt_of_a_deep_chain_hits_all_of_the_one_before(checkpoint):
    requests = [(prompt, 3) for prompt in chain()]

    async def check(llm):
        outputs = [await collect(llm, ids(prompt), greedy(n)) for prompt, n in requests]
        hits = [output.num_cached_tokens for output in outputs]
        assert hits == [len(prompt) - BLOCK for prompt, _ in requests]
        check_outputs(checkpoint[1], requests, outputs)
        for prompt in chain()[::10]:
            output = await collect(llm, ids([*prompt, 1]), greedy(1))
            assert output.num_cached_tokens == len(prompt)

    scheduler, blocks = run(checkpoint, check, **tree_options(4 * TREE))
    assert scheduler["prefill_tokens"] == TREE * BLOCK + TREE // 10
    assert blocks["evictions"] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deep_tree_in_random_order_under_eviction_is_exact(checkpoint, depth):
    rng = random.Random(depth)
    tails = ragged_prompts(211, [rng.randrange(1, 9) for _ in range(TREE)], seed=depth)
    # Half of the prompts leave the chain where they end: the tree's leaves.
    requests = [
        (prompt[: -len(tail)] + tail if rng.random() < 0.5 and len(prompt) > 8 else prompt, 3)
        for prompt, tail in zip(chain(), tails, strict=True)
    ]
    rng.shuffle(requests)

    async def check(llm):
        check_outputs(checkpoint[1], requests, await together(llm, requests))

    scheduler, blocks = run(checkpoint, check, pipeline_depth=depth, **tree_options(TREE + 5))
    assert scheduler["prefill_tokens"] <= blocks["prompt_tokens"] - blocks["hit_tokens"]
    assert blocks["hit_tokens"] > blocks["prompt_tokens"] // 4
    assert blocks["evictions"] > TREE
