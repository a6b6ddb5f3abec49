"""Log-probabilities through whole engines equal transformers' log-softmax, under every schedule."""

import asyncio

import pytest
import torch

from nanoactor import RequestOutputKind, SamplingParams
from nanoactor.errors import InvalidRequest
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts
from tests.engine.schedules import schedules
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint

VOCABULARY = 211
CLOSE = 1e-4
WAYS = [
    dict(logprobs=0),
    dict(logprobs=3, prompt_logprobs=0),
    dict(prompt_logprobs=5),
    dict(),
    dict(logprobs=20, prompt_logprobs=20, temperature=0.9, seed=3),
    dict(logprobs=2, temperature=1.2, top_k=9, seed=4),
    # They are the model's own: no rule of the request changes them.
    dict(logprobs=2, frequency_penalty=1.5, logit_bias={7: 30.0}),
    dict(prompt_logprobs=2, logprobs=1, n=3, temperature=1.0, seed=5),
]


class ScoredReference(Reference):
    """Log-probabilities are those of transformers' logits."""

    def check_output(self, output, params):
        prompt = output.prompt_token_ids
        for answer in output.outputs:
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
            rows = logits.float().log_softmax(-1)
            if params.logprobs is None:
                assert answer.logprobs is answer.cumulative_logprob is None
            else:
                own = rows[len(prompt) - 1 :]
                found = zip(answer.token_ids, answer.logprobs, strict=True)
                total = 0.0
                for (token, told), row in zip(found, own, strict=False):
                    total += self.check_place(token, told, row, params.logprobs)
                assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            return
        assert output.num_cached_tokens == 0
        first, *others = output.prompt_logprobs
        assert first is None
        for token, told, row in zip(prompt[1:], others, rows[: len(prompt) - 1], strict=True):
            self.check_place(token, told, row, params.prompt_logprobs)

    def check_place(self, token, told, row, count):
        """What is told in one place: the token, and so many of the likeliest."""
        self.positions += 1
        assert next(iter(told)) == token
        assert told[token].logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert abs(told[token].rank - 1 - int((row > row[token]).sum())) <= _near(row, row[token])
        ranked = sorted(told.items(), key=lambda item: item[1].rank)
        likeliest = row.topk(count).values.tolist()
        found = [one.logprob for _, one in ranked[:count]]
        assert found == pytest.approx(likeliest, abs=CLOSE)
        for other, one in told.items():
            assert one.logprob == pytest.approx(float(row[other]), abs=CLOSE)
        assert len(told) in (count, count + 1)
        return told[token].logprob


def _near(row, value):
    """How many others are so near that their order may be another."""
    return int(((row - value).abs() < CLOSE).sum()) - 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scored")
    return directory, ScoredReference(make_checkpoint(directory, **CONFIGURATIONS["untied"]))


def params(way, tokens=16):
    return SamplingParams.for_model(
        **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **way}
    )


@schedules()
def test_every_schedule_tells_those_of_transformers(checkpoint, schedule):
    directory, reference = checkpoint
    stem = ragged_prompts(VOCABULARY, [30], seed=4)[0]
    tails = ragged_prompts(VOCABULARY, [1 + n for n in range(16)], seed=6)
    prompts = [stem[: 4 * (n % 8)] + tail for n, tail in enumerate(tails)]
    asked = [params(WAYS[n % len(WAYS)]) for n in range(len(prompts))]

    async def main():
        async with engine(directory, **schedule.changes) as llm:
            requests = [collect(llm, ids(p), how) for p, how in zip(prompts, asked, strict=True)]
            return await asyncio.gather(*requests), await llm.statistics()

    outputs, figures = asyncio.run(main())
    for output, how in zip(outputs, asked, strict=True):
        assert [len(answer.token_ids) for answer in output.outputs] == [16] * how.n
        reference.check_output(output, how)
    assert reference.positions > 400
    schedule.check(figures)


def test_a_prompt_in_the_cache_is_computed_again_and_stays_there(checkpoint):
    directory, reference = checkpoint
    (prompt,) = ragged_prompts(VOCABULARY, [45], seed=1)
    scored = params(dict(prompt_logprobs=1, logprobs=1))

    async def main():
        async with engine(directory, block_size=4) as llm:
            before = await collect(llm, ids(prompt), greedy(8))
            again = await asyncio.gather(*(collect(llm, ids(prompt), scored) for _ in range(2)))
            after = await collect(llm, ids(prompt), greedy(8))
            return before, again, after

    before, again, after = asyncio.run(main())
    assert after.num_cached_tokens == 44
    assert before.outputs[0].token_ids == after.outputs[0].token_ids
    for output in again:
        reference.check_output(output, scored)


def test_deltas_bring_each_once(checkpoint):
    directory, _ = checkpoint
    (prompt,) = ragged_prompts(VOCABULARY, [9], seed=1)

    async def main():
        async with engine(directory) as llm:
            whole = await collect(llm, ids(prompt), params(dict(logprobs=2, prompt_logprobs=1)))
            how = params(dict(logprobs=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA))
            return whole, [output async for output in llm.generate(ids(prompt), how)]

    whole, deltas = asyncio.run(main())
    assert [output.prompt_logprobs is not None for output in deltas] == [True] + [False] * (
        len(deltas) - 1
    )
    assert deltas[0].prompt_logprobs == whole.prompt_logprobs
    told = [one for output in deltas for one in output.outputs[0].logprobs]
    assert told == whole.outputs[0].logprobs


def test_of_a_prompt_that_is_not_computed_to_its_end_nothing_is_told(checkpoint):
    directory, _ = checkpoint
    (prompt,) = ragged_prompts(VOCABULARY, [400], seed=1)

    async def main():
        async with engine(directory, max_num_batched_tokens=1, max_num_seqs=1) as llm:
            how = params(dict(prompt_logprobs=1))
            reading = asyncio.ensure_future(collect(llm, ids(prompt), how, request_id="one"))
            while (await llm.statistics())["runner.0"]["actor"]["steps_done"] < 5:
                await asyncio.sleep(0.002)
            await llm.abort("one")
            return await reading

    output = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort"
    assert output.prompt_logprobs is None


def test_more_than_the_engine_tells_is_refused(checkpoint):
    directory, _ = checkpoint

    async def main():
        async with engine(directory, max_logprobs=3) as llm:
            for name in ("logprobs", "prompt_logprobs"):
                with pytest.raises(InvalidRequest, match=rf"{name} is 4.*max_logprobs"):
                    await collect(llm, ids([1, 2]), params({name: 4}))
            return await collect(llm, ids([1, 2]), params(dict(logprobs=3)))

    assert len(asyncio.run(main()).outputs[0].logprobs) == 16


def test_a_vocabulary_may_be_smaller_than_what_is_asked(tmp_path):
    make_checkpoint(tmp_path, **{**CONFIGURATIONS["untied"], "vocab_size": 7})

    async def main():
        async with engine(tmp_path) as llm:
            return await collect(llm, ids([1, 2]), params(dict(logprobs=20, prompt_logprobs=20)))

    output = asyncio.run(main())
    assert [len(told) for told in output.outputs[0].logprobs] == [7] * 16
    assert len(output.prompt_logprobs[1]) == 7
