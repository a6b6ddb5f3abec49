"""The prefix cache saves computation: every prefilled token is counted, and none twice."""

import asyncio

import pytest

from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.models.checkpoints import make_checkpoint

BLOCK = 16
VOCABULARY = 211
PREFIX, LEFT, RIGHT, WEDGE = ragged_prompts(VOCABULARY, [1000, 480, 480, 313], seed=6)
SHARED = 1000 // BLOCK * BLOCK
"""Only full blocks are shared."""
TAIL = 3
WHOLE = 1000 + TAIL


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long")
    return directory, Reference(make_checkpoint(directory, max_position_embeddings=2048))


def run(checkpoint, scenario, **changes):
    """Play a scenario on an engine of its own; all outputs it returns must be exact."""
    directory, reference = checkpoint

    async def main():
        async with engine(directory, placement="single", block_size=BLOCK, **changes) as llm:
            return await scenario(llm)

    for output in asyncio.run(main()):
        reference.check(output.prompt_token_ids, output.outputs[0].token_ids)
    reference.conclude()


def tailed(number, prefix=PREFIX):
    """A prompt of its own behind the prefix."""
    return prefix + ragged_prompts(VOCABULARY, [TAIL], seed=100 + number)[0]


def ask(llm, prompt, tokens=2):
    return asyncio.ensure_future(collect(llm, ids(prompt), greedy(tokens)))


async def counts(llm):
    figures = await llm.statistics()
    return {**figures["scheduler"]["actor"], **figures["blocks"]["actor"]}


async def until(llm, name):
    """Wait until something was counted; the engine runs on this very loop and needs time."""
    while not (count := (await counts(llm))[name]):
        await asyncio.sleep(0.001)
    return count


async def costs(llm, *prompts):
    """What these prompts at once give, and by how much they raise the counts."""
    before = await counts(llm)
    outputs = await asyncio.gather(*(ask(llm, prompt) for prompt in prompts))
    after = await counts(llm)
    names = ("prompt_tokens", "hit_tokens", "prefill_tokens", "evictions")
    return outputs, {name: after[name] - before[name] for name in names}


async def one(llm, prompt):
    """(its output, tokens found, tokens computed, blocks evicted) of one prompt."""
    (output,), cost = await costs(llm, prompt)
    assert cost["prompt_tokens"] == len(prompt)
    assert cost["hit_tokens"] == output.num_cached_tokens
    return output, output.num_cached_tokens, cost["prefill_tokens"], cost["evictions"]


def test_a_second_request_computes_only_what_is_not_shared(checkpoint):
    async def scenario(llm):
        first, *cost = await one(llm, tailed(1))
        assert cost == [0, WHOLE, 0]
        second, *cost = await one(llm, tailed(2))
        assert cost == [SHARED, WHOLE - SHARED, 0]
        return [first, second]

    run(checkpoint, scenario)


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed(checkpoint):
    async def scenario(llm):
        first = await ask(llm, PREFIX[:SHARED], 1)
        second, *cost = await one(llm, PREFIX[:SHARED])
        assert cost == [SHARED - BLOCK, BLOCK, 0]
        return [first, second]

    run(checkpoint, scenario)


def test_a_block_is_cached_once_its_last_token_is_computed(checkpoint):
    async def scenario(llm):
        first = await ask(llm, PREFIX[:SHARED], 1)
        second, *cost = await one(llm, PREFIX[: SHARED + 1])
        assert cost == [SHARED, 1, 0]
        return [first, second]

    run(checkpoint, scenario)


def test_the_next_turn_finds_the_answer_in_the_cache(checkpoint):
    async def scenario(llm):
        first = await ask(llm, tailed(1), 53)
        told = [*tailed(1), *first.outputs[0].token_ids]
        second, *cost = await one(llm, told + tailed(2, []))
        # The last block is not: its last token was told, but is only computed now.
        assert len(told) % BLOCK == 0
        found = len(told) - BLOCK
        assert cost == [found, len(told) + TAIL - found, 0]
        return [first, second]

    run(checkpoint, scenario)


def test_without_the_cache_everything_is_computed(checkpoint):
    async def scenario(llm):
        outputs = []
        for number in (1, 2):
            output, *cost = await one(llm, tailed(number))
            assert cost == [0, WHOLE, 0]
            outputs.append(output)
        return outputs

    run(checkpoint, scenario, enable_prefix_caching=False)


def test_the_prefix_of_a_request_that_decodes_is_shared(checkpoint):
    async def scenario(llm):
        first = ask(llm, tailed(1), 300)
        await until(llm, "decode_tokens")
        second, *cost = await one(llm, tailed(2))
        assert not first.done()
        assert cost == [SHARED, WHOLE - SHARED, 0]
        return [await first, second]

    run(checkpoint, scenario)


@pytest.mark.parametrize("tokens", [16, 64])
def test_the_prefix_of_a_request_that_is_being_prefilled_is_shared(checkpoint, tokens):
    async def scenario(llm):
        first = ask(llm, tailed(1))
        assert await until(llm, "prefill_tokens") < SHARED // 2
        second = await ask(llm, tailed(2))
        assert (await counts(llm))["prefill_tokens"] == 2 * WHOLE - SHARED
        assert second.num_cached_tokens == SHARED
        return [await first, second]

    run(checkpoint, scenario, max_num_batched_tokens=tokens, max_num_seqs=4)


@pytest.mark.parametrize(("tokens", "depth"), [(32, 1), (64, 2), (2048, 2), (300, 3)])
def test_a_prefix_that_many_ask_for_at_the_same_moment_is_computed_once(checkpoint, tokens, depth):
    prompts = [tailed(number) for number in range(8)]

    async def scenario(llm):
        outputs, cost = await costs(llm, *prompts)
        tails = sum(len(prompt) - len(PREFIX) for prompt in prompts)
        assert cost["prefill_tokens"] <= len(PREFIX) + tails + len(prompts) * BLOCK
        assert cost["prefill_tokens"] == cost["prompt_tokens"] - cost["hit_tokens"]
        assert cost["hit_tokens"] == sum(output.num_cached_tokens for output in outputs)
        return outputs

    run(checkpoint, scenario, max_num_batched_tokens=tokens, pipeline_depth=depth)


def test_what_pressure_evicted_is_computed_again_and_what_is_left_is_not(checkpoint):
    """A prompt of 63 blocks and one of 30 in 80: each takes 12 of the other's blocks."""
    other = ragged_prompts(VOCABULARY, [473], seed=7)[0]

    async def scenario(llm):
        outputs, story = [], []
        for prompt in (tailed(1), other, tailed(2), other, tailed(3)):
            output, *cost = await one(llm, prompt)
            outputs.append(output)
            story.append(tuple(cost))
        assert story == [
            (0, WHOLE, 0),
            (0, 473, 12),
            ((62 - 12) * BLOCK, WHOLE - 50 * BLOCK, 12),
            ((29 - 12) * BLOCK, 473 - 17 * BLOCK, 12),
            ((62 - 12) * BLOCK, WHOLE - 50 * BLOCK, 12),
        ]
        return outputs

    run(checkpoint, scenario, num_kv_blocks=80, max_model_len=1100)


@pytest.mark.parametrize(("used", "unused"), [(LEFT, RIGHT), (RIGHT, LEFT)], ids=["old", "new"])
def test_the_least_recently_used_prefix_goes_first_and_children_before_parents(
    checkpoint, used, unused
):
    """Two prefixes of 30 blocks are cached; a wedge of 20 takes the 10 that are free and 10
    more: from the end of the prefix that was not used since, whichever was stored first."""

    async def scenario(llm):
        outputs = [await ask(llm, [*prefix, 1]) for prefix in (LEFT, RIGHT)]
        for prompt, cost in (
            ([*used, 2], [480, 1, 0]),
            (WEDGE, [0, 313, 10]),
            ([*used, 3], [480, 1, 0]),
            ([*unused, 4], [320, 161, 10]),
        ):
            output, *found = await one(llm, prompt)
            assert found == cost
            outputs.append(output)
        return outputs

    run(checkpoint, scenario, num_kv_blocks=70, max_model_len=1100)


def test_the_statistics_tell_tokens_saved_and_the_hit_ratio(checkpoint):
    async def scenario(llm):
        outputs = [await ask(llm, tailed(number)) for number in range(4)]
        figures = await counts(llm)
        assert figures["prompt_tokens"] == 4 * WHOLE
        assert figures["hit_tokens"] == 3 * SHARED
        assert figures["hit_ratio"] == pytest.approx(3 * SHARED / (4 * WHOLE))
        assert figures["prefill_tokens"] == figures["prompt_tokens"] - figures["hit_tokens"]
        return outputs

    run(checkpoint, scenario)
