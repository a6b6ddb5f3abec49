"""Several answers to one prompt are those of several requests, and share what they can."""

import asyncio

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from nanoactor.errors import InvalidRequest
from nanoactor.requests.params import derived_seed
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, ids, ragged_prompts
from tests.engine.schedules import schedules
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint

VOCABULARY = 211


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("answers")
    make_checkpoint(directory, **CONFIGURATIONS["untied"])
    return directory


def sampled(seed, tokens=12, **more):
    return SamplingParams.for_model(
        temperature=0.9, seed=seed, max_tokens=tokens, ignore_eos=True, **more
    )


# Penalties read the ids that a copied block holds.
KINDS = [dict(), dict(top_k=20), dict(top_p=0.8), dict(repetition_penalty=1.4, logit_bias={3: 2.0})]


async def by_themselves(directory, prompts, count):
    """What separate requests with the derived seeds get."""

    async def tokens(prompt, seed, kind):
        output = await collect(llm, ids(prompt), sampled(seed, 20, **kind))
        return output.outputs[0].token_ids

    async with engine(directory, max_num_seqs=4) as llm:
        return [
            [await tokens(prompt, derived_seed(at, n), KINDS[at % 4]) for n in range(count)]
            for at, prompt in enumerate(prompts)
        ]


@pytest.fixture(scope="module")
def expected(checkpoint):
    # Shorter than a block, whole blocks, and one more or less than that.
    prompts = ragged_prompts(VOCABULARY, [1, 3, 4, 5, 8, 15, 16, 17, 30], seed=2)
    return prompts, asyncio.run(by_themselves(checkpoint, prompts, 5))


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.long)])
@schedules()
def test_answers_are_those_of_requests_with_their_seeds(checkpoint, expected, schedule, caching):
    prompts, right = expected
    changes = {"enable_prefix_caching": caching, **schedule.changes}

    async def main():
        async with engine(checkpoint, **changes) as llm:
            requests = [
                collect(llm, ids(prompt), sampled(at, 20, n=5, **KINDS[at % 4]))
                for at, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*requests), await llm.statistics()

    outputs, figures = asyncio.run(main())
    for prompt, output, tokens in zip(prompts, outputs, right, strict=True):
        assert output.prompt_token_ids == prompt
        assert [answer.index for answer in output.outputs] == [*range(5)]
        assert [answer.token_ids for answer in output.outputs] == tokens
        assert {answer.finish_reason for answer in output.outputs} == {"length"}
    schedule.check(figures)


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_and_held_once(checkpoint, caching):
    (prompt,) = ragged_prompts(VOCABULARY, [62], seed=1)

    async def main():
        changes = dict(block_size=4, num_kv_blocks=40, max_num_seqs=8, max_model_len=80)
        async with engine(checkpoint, enable_prefix_caching=caching, **changes) as llm:
            output = await collect(llm, ids(prompt), sampled(1, tokens=8, n=8))
            return output, (await llm.statistics())["scheduler"]["actor"]

    output, figures = asyncio.run(main())
    assert figures["prefill_tokens"] == len(prompt)
    # 15 blocks together and 3 each: as eight requests they would need 144 of 40.
    assert figures["preemptions"] == 0
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 8


def test_more_answers_than_sequences_finish(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [11], seed=1)

    async def main(seqs, **changes):
        async with engine(checkpoint, max_num_seqs=seqs, **changes) as llm:
            first, second = await asyncio.gather(
                collect(llm, ids(prompt), sampled(1, n=30)),
                collect(llm, ids(prompt), sampled(2, n=3)),
            )
            return [[a.token_ids for a in output.outputs] for output in (first, second)]

    few = asyncio.run(main(2))
    assert few == asyncio.run(main(40))
    tight = dict(num_kv_blocks=10, block_size=4, max_model_len=40, enable_prefix_caching=False)
    assert few == asyncio.run(main(7, **tight))


def test_closing_a_stream_ends_all_answers(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [11], seed=1)

    async def main():
        async with engine(checkpoint, max_num_seqs=3) as llm:
            stream = llm.generate(ids(prompt), sampled(1, tokens=90, n=9))
            async for output in stream:
                assert len(output.outputs) == 9
                break
            await stream.aclose()
            other = await collect(llm, ids(prompt), sampled(1))
            return len(other.outputs[0].token_ids)

    assert asyncio.run(main()) == 12


def test_a_request_that_is_refused_has_no_answers(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [11], seed=1)

    async def main():
        async with engine(checkpoint) as llm:
            return await asyncio.gather(
                collect(llm, ids([*prompt, 500]), sampled(1, n=4)),
                collect(llm, ids(prompt), sampled(1, n=4)),
                return_exceptions=True,
            )

    wrong, right = asyncio.run(main())
    assert isinstance(wrong, InvalidRequest)
    assert "token id 500" in str(wrong)
    assert len(right.outputs) == 4


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_answer_without_a_choice_ends_the_others(checkpoint, kind):
    """Some run, some wait: one error, and nothing is left of any."""

    async def main():
        async with engine(DEMO, skip_tokenizer_init=False, max_num_seqs=3) as llm:
            tokenizer = await llm.get_tokenizer()
            rules = dict(
                # After one of the two, neither may follow; a third leads out of it.
                allowed_token_ids=[tokenizer.convert_tokens_to_ids(letter) for letter in "zqx"],
                bad_words=["zz", "zq", "zx", "qz", "qq", "qx"],
            )
            how = sampled(5, tokens=400, n=6, output_kind=kind, **rules)
            outputs = []
            with pytest.raises(InvalidRequest, match="leave no token to choose"):
                async for output in llm.generate("ROMEO:", how):
                    outputs.append(output)
            return outputs

    outputs = asyncio.run(main())  # which ends once nothing is held anywhere
    assert all(answer.finish_reason is None for output in outputs for answer in output.outputs)


def test_times_are_those_of_each_answer(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [11], seed=1)

    async def main():
        async with engine(checkpoint, max_num_seqs=2) as llm:
            (request,) = llm.submit([ids(prompt)], sampled(1, tokens=30, n=6))
            async for output in request:
                last = output
            return last, [request.metrics_of(index) for index in range(6)]

    output, each = asyncio.run(main())
    firsts, ends = [one.first_token_time for one in each], [one.finished_time for one in each]
    assert output.metrics.first_token_time == min(firsts)
    assert output.metrics.finished_time == max(ends)
    # Two at a time: whoever waits begins when somebody has ended.
    assert sorted(firsts)[2] >= min(ends)
    assert sorted(firsts)[4] >= sorted(ends)[2]


def test_too_many_answers_for_the_queue_are_refused(checkpoint):
    async def main():
        async with engine(checkpoint, max_waiting_requests=4) as llm:
            with pytest.raises(InvalidRequest, match="5 answers were requested at once"):
                await collect(llm, ids([1, 2]), sampled(1, n=5))
            return await collect(llm, ids([1, 2]), sampled(1, n=4))

    assert len(asyncio.run(main()).outputs) == 4


def test_derived_seeds_are_all_different():
    seeds = {derived_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128
    assert max(seeds) < 2**64
    assert derived_seed(17, 0) == 17
