"""Held answers through whole engines: what they cost, what the door refuses, and silence."""

import asyncio

import pytest

from nanoactor import SamplingParams
from nanoactor.errors import HoldExpired, InvalidRequest
from tests.engine.harness import collect, engine, greedy, ids, ragged_prompts
from tests.models.checkpoints import make_checkpoint

VOCABULARY = 61


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("held")
    make_checkpoint(directory, vocab_size=VOCABULARY)
    return directory


def params(n=2, tokens=12):
    return SamplingParams.for_model(
        n=n, max_tokens=tokens, temperature=0.0, logprobs=3, ignore_eos=True, detokenize=False
    )


def top(told):
    """The likeliest token of each answer."""
    return [max(one, key=lambda token: one[token].logprob) for one in told]


async def prefilled(llm):
    return (await llm.statistics())["scheduler"]["actor"]["prefill_tokens"]


@pytest.mark.parametrize("caching", [True, False])
def test_one_that_stays_costs_a_position_and_so_does_a_copy(checkpoint, caching):
    (prompt,) = ragged_prompts(VOCABULARY, [10], seed=1)

    async def main():
        async with engine(checkpoint, block_size=4, enable_prefix_caching=caching) as llm:
            request = llm.submit_held(ids(prompt), params())
            told = await request.held()
            costs = []
            for parents in ([0, 1], [0, 1], [0, 0], [1, 0], [0, 1]):
                before = await prefilled(llm)
                request.resume_held(parents, top(told))
                told = await request.held()
                costs.append(await prefilled(llm) - before)
            request.resume_held([-1, -1], [0, 0])
            output = [output async for output in request][-1]
            assert [one.finish_reason for one in output.outputs] == ["stop", "stop"]
            assert costs == [2] * 5

    asyncio.run(main())


def test_an_answer_that_goes_on_with_the_likeliest_is_the_greedy_one(checkpoint):
    prompts = ragged_prompts(VOCABULARY, [1, 7, 20], seed=2)

    async def search(llm, prompt):
        request = llm.submit_held(ids(prompt), params(n=3, tokens=9))
        found, told = [], await request.held()
        for turn in range(8):
            found.append(top(told)[0])
            # The best stays where it is, or moves.
            request.resume_held([turn % 3 and 0, 0, 0], [found[-1]] * 3)
            told = await request.held()
        request.close()
        return [*found, top(told)[0]]

    async def main():
        async with engine(checkpoint, block_size=4) as llm:
            both = await asyncio.gather(*(search(llm, prompt) for prompt in prompts))
            for prompt, found in zip(prompts, both, strict=True):
                output = await collect(llm, ids(prompt), greedy(9))
                assert output.outputs[0].token_ids == found

    asyncio.run(main())


def test_the_door_refuses_what_cannot_be_and_nothing_changes(checkpoint):
    async def main():
        async with engine(checkpoint, block_size=4) as llm:
            with pytest.raises(InvalidRequest, match="requires logprobs and max_tokens"):
                llm.submit_held(ids([1]), SamplingParams.for_model(max_tokens=3))
            request = llm.submit_held(ids([1, 2]), params(tokens=3))
            with pytest.raises(InvalidRequest, match="not paused"):
                request.resume_held([0, 1], [1, 1])
            await request.held()
            for match, parents, tokens in [
                ("one item for each of the 2 answers, got 1 parents and 1 tokens", [0], [1]),
                ("from -1 to 1", [0, 2], [1, 1]),
                ("from 0 to 60", [0, 1], [1, VOCABULARY]),
            ]:
                with pytest.raises(InvalidRequest, match=match):
                    request.resume_held(parents, tokens)
            request.resume_held([0, -1], [1, 0])
            with pytest.raises(InvalidRequest, match="not paused"):
                request.resume_held([0, -1], [1, 0])
            await request.held()
            while request._entry.answers[1].terminal is None:
                await asyncio.sleep(0.001)
            with pytest.raises(InvalidRequest, match=r"answers \[1\] have ended"):
                request.resume_held([0, 0], [1, 1])
            request.resume_held([0, -1], [1, 0])
            await request.held()
            with pytest.raises(InvalidRequest, match="have reached max_tokens"):
                request.resume_held([0, -1], [1, 0])
            request.close()

    asyncio.run(main())


def test_a_silent_caller_loses_its_answers(checkpoint):
    async def main():
        async with engine(checkpoint, block_size=4, hold_timeout=0.05) as llm:
            request = llm.submit_held(ids([1, 2]), params())
            await request.held()
            while not request._entry.is_over:
                await asyncio.sleep(0.01)
            with pytest.raises(HoldExpired, match="hold_timeout"):
                request.resume_held([0, 1], [1, 1])
            with pytest.raises(HoldExpired):
                await request.held()
            # Leaving the engine asserts that nothing is held.

    asyncio.run(main())


def test_more_answers_than_slots_are_held(checkpoint):
    async def main():
        async with engine(checkpoint, block_size=4, max_num_seqs=2) as llm:
            request = llm.submit_held(ids([1, 2, 3]), params(n=5))
            told = await request.held()
            for _ in range(4):
                request.resume_held([0, 0, 1, 2, 3], top(told))
                told = await request.held()
                assert len(told) == 5
            request.close()

    asyncio.run(main())
