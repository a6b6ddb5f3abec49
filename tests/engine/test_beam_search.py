"""Beam search through whole engines: vLLM's definition on transformers' logits, and transformers'
own search where the two definitions agree."""

import asyncio

import pytest
import torch

from nanoactor import LLM, BeamSearchParams, SamplingParams
from nanoactor.errors import EngineOverloaded, InvalidRequest
from tests.engine.beam_reference import TIE, search, transformers_definition
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy, ids, ragged_prompts, short
from tests.models.checkpoints import make_checkpoint

VOCABULARY = 61
EOS = (5, 17)
PENALTIES = [1.0, 0.0, 0.6, 2.0, -0.5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose vocabulary is so small that its ends are often among the candidates."""
    directory = tmp_path_factory.mktemp("beams")
    model = make_checkpoint(directory, vocab_size=VOCABULARY, eos_token_id=list(EOS))
    return directory, model


def searches(directory, asked, **changes):
    """(results, figures) of (prompt, parameters) on an engine, all at once."""

    async def main():
        async with engine(directory, block_size=4, **changes) as llm:
            found = await asyncio.gather(*(llm.beam_search(ids(p), how) for p, how in asked))
            return found, await llm.statistics()

    return asyncio.run(main())


class Comparison:
    """Counts what could not be compared; with many of those it would show nothing."""

    def __init__(self):
        self.compared = self.ties = self.ends = 0

    def check(self, prompt, output, expected):
        """The sequences of an engine are those of a reference, in their order."""
        if expected.margin < TIE:
            self.ties += 1
            return
        self.compared += 1
        assert [b.tokens[len(prompt) :] for b in output.sequences] == expected.outputs
        for beam, total in zip(output.sequences, expected.sums, strict=True):
            assert beam.tokens[: len(prompt)] == prompt
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert len(beam.logprobs) == len(beam.tokens) - len(prompt)
            assert beam.text is None
            self.ends += beam.finish_reason == "stop"

    def conclude(self):
        assert self.compared > 0
        assert self.ties <= 0.1 * (self.compared + self.ties), (self.compared, self.ties)


def check_all(checkpoint, prompts, widths, tokens, **changes):
    directory, model = checkpoint
    asked = [
        (prompt, BeamSearchParams(width, tokens, length_penalty=PENALTIES[at % len(PENALTIES)]))
        for at, prompt in enumerate(prompts)
        for width in widths
    ]
    found, figures = searches(directory, asked, **changes)
    comparison = Comparison()
    for (prompt, how), output in zip(asked, found, strict=True):
        expected = search(model, prompt, how.beam_width, tokens, EOS, how.length_penalty)
        comparison.check(prompt, output, expected)
    comparison.conclude()
    assert comparison.ends > 0
    return figures


TIGHT = dict(num_kv_blocks=30, max_model_len=80, max_num_seqs=6, max_num_batched_tokens=24)


@pytest.mark.parametrize(
    "changes", [dict(), dict(TIGHT, pipeline_depth=3), dict(enable_prefix_caching=False)]
)
def test_sequences_are_those_of_vllms_definition(checkpoint, changes):
    prompts = ragged_prompts(VOCABULARY, [1, 3, 4, 9, 17], seed=3)
    check_all(checkpoint, prompts, [1, 2, 4], 7, **changes)


@pytest.mark.long
@pytest.mark.parametrize("changes", [dict(), dict(TIGHT, num_kv_blocks=40, pipeline_depth=3)])
def test_many_sequences_are_those_of_vllms_definition(checkpoint, changes):
    prompts = ragged_prompts(VOCABULARY, [1 + n % 40 for n in range(60)], seed=5)
    check_all(checkpoint, prompts, [1, 2, 4, 8], 16, **changes)


def theirs(model, prompt, width, tokens, eos, **more):
    """Tokens of output of transformers' own beam search, the best first."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        **more,
    )
    outputs = []
    for row in made[:, len(prompt) :].tolist():
        ends = [at for at, token in enumerate(row) if token in eos]
        outputs.append(row[: ends[0] + 1] if ends else row)
    return outputs


@pytest.fixture
def without_eos(checkpoint):
    """transformers takes the configuration's ids where it is told of none."""
    _, model = checkpoint
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    yield model
    model.generation_config.eos_token_id = before


def check_equal_without_ends(checkpoint, model, prompts, widths, tokens):
    asked = [
        (prompt, BeamSearchParams(width, tokens, ignore_eos=True, length_penalty=penalty))
        for prompt, penalty in zip(prompts, PENALTIES * len(prompts), strict=False)
        for width in widths
    ]
    found, _ = searches(checkpoint[0], asked)
    comparison = Comparison()
    for (prompt, how), output in zip(asked, found, strict=True):
        expected = search(model, prompt, how.beam_width, tokens)
        more = dict(length_penalty=how.length_penalty, early_stopping=True)
        if expected.margin >= TIE:
            assert theirs(model, prompt, how.beam_width, tokens, (), **more) == expected.outputs
        comparison.check(prompt, output, expected)
    comparison.conclude()


def test_where_nothing_ends_early_it_is_transformers_search(checkpoint, without_eos):
    """All sequences are equally long then, so that no definition of length matters."""
    prompts = ragged_prompts(VOCABULARY, [2, 5, 12], seed=8)
    check_equal_without_ends(checkpoint, without_eos, prompts, [2, 4], 8)


@pytest.mark.long
def test_where_nothing_ends_early_it_is_transformers_search_at_length(checkpoint, without_eos):
    prompts = ragged_prompts(VOCABULARY, [1 + n for n in range(30)], seed=9)
    check_equal_without_ends(checkpoint, without_eos, prompts, [2, 4, 8], 30)


def check_differences(model, prompts, widths, tokens):
    """The reference by transformers' points is transformers' search. By vLLM's with a penalty of 0,
    where no length counts, it is too, unless an end from below the likeliest is in the result."""
    compared = ties = agreeing = 0
    for at, prompt in enumerate(prompts):
        for width in widths:
            early, penalty = [True, False, "never"][at % 3], PENALTIES[at % len(PENALTIES)]
            rule = transformers_definition(early)
            expected = search(model, prompt, width, tokens, EOS, penalty, rule)
            found = theirs(
                model, prompt, width, tokens, EOS, length_penalty=penalty, early_stopping=early
            )
            ties += expected.margin < TIE
            compared += 1
            assert expected.margin < TIE or found == expected.outputs, (early, penalty, width)
            vllms = search(model, prompt, width, tokens, EOS, 0.0)
            if vllms.margin >= TIE and not vllms.ended_below:
                agreeing += 1
                more = dict(length_penalty=0.0, early_stopping="never")
                assert theirs(model, prompt, width, tokens, EOS, **more) == vllms.outputs
    assert ties <= 0.1 * compared, (ties, compared)
    assert agreeing > 0


def test_transformers_differs_in_what_is_documented_and_in_nothing_else(checkpoint):
    prompts = ragged_prompts(VOCABULARY, [2, 3, 5, 8, 12, 16], seed=11)
    check_differences(checkpoint[1], prompts, [2, 4], 7)


@pytest.mark.long
def test_transformers_differs_in_nothing_else_at_length(checkpoint):
    prompts = ragged_prompts(VOCABULARY, [1 + n for n in range(45)], seed=12)
    check_differences(checkpoint[1], prompts, [2, 4, 8], 16)


def test_a_step_computes_at_most_a_block_for_each_beam(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [50], seed=1)
    params = BeamSearchParams(4, 20, ignore_eos=True)
    _, figures = searches(checkpoint[0], [(prompt, params)])
    assert figures["scheduler"]["actor"]["prefill_tokens"] <= 50 + 19 * 4 * 4


def test_a_cancelled_search_leaves_nothing(checkpoint):
    (prompt,) = ragged_prompts(VOCABULARY, [30], seed=1)

    async def main():
        async with engine(checkpoint[0], block_size=4) as llm:
            params = BeamSearchParams(8, 400, ignore_eos=True)
            tasks = [asyncio.ensure_future(llm.beam_search(ids(prompt), params)) for _ in range(3)]
            for done, task in zip((1, 5, 9), tasks, strict=True):
                while (await llm.statistics())["runner.0"]["actor"]["steps_done"] < done:
                    await asyncio.sleep(0.001)
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(one) for one in ended] == [asyncio.CancelledError] * 3
            # Leaving the engine asserts that nothing is held.
            return await collect(llm, ids(prompt), greedy(3))

    assert len(asyncio.run(main()).outputs[0].token_ids) == 3


def test_a_search_waits_for_room_once_it_has_begun(checkpoint):
    prompts = ragged_prompts(VOCABULARY, [5, 6], seed=1)
    params = BeamSearchParams(4, 6, ignore_eos=True)

    async def main():
        async with engine(checkpoint[0], max_waiting_requests=4) as llm:
            both = await asyncio.gather(*(llm.beam_search(ids(p), params) for p in prompts))
            waiting = [asyncio.ensure_future(collect(llm, ids(p), greedy(1))) for p in prompts * 2]
            await asyncio.sleep(0)
            with pytest.raises(EngineOverloaded):
                await llm.beam_search(ids(prompts[0]), params)
            await asyncio.gather(*waiting)
            return both

    both = asyncio.run(main())
    alone, _ = searches(checkpoint[0], [(prompt, params) for prompt in prompts])
    for output, other in zip(both, alone, strict=True):
        assert [b.tokens for b in output.sequences] == [b.tokens for b in other.sequences]


def test_what_cannot_be_searched_is_refused(checkpoint):
    async def main():
        async with engine(checkpoint[0], max_waiting_requests=9) as llm:

            async def refused(match, params, prompt=None):
                with pytest.raises(InvalidRequest, match=match):
                    await llm.beam_search(prompt or ids([1, 2]), params)

            await refused("beam_width 11 needs the 22.*raise max_logprobs", BeamSearchParams(11, 4))
            await refused("raise max_waiting_requests", BeamSearchParams(10, 4))
            await refused("max_tokens is 511, but after a prompt of 2", BeamSearchParams(2, 511))
            await refused(
                "must be a BeamSearchParams object, got SamplingParams", SamplingParams.for_model()
            )
            seen = {"prompt_token_ids": [1], "multi_modal_data": {"image": [b""]}}
            await refused("images and videos", BeamSearchParams(2, 4), seen)
            chat = [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]
            await refused("images and videos", BeamSearchParams(2, 4), chat)
            await refused("outside the vocabulary", BeamSearchParams(2, 4), ids([VOCABULARY]))

    asyncio.run(main())


def test_no_beam_goes_on_with_what_stands_for_an_image(tmp_path):
    """In the next step's prompt it would be refused; here all tokens are candidates."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    placed = dict(zip(names, range(36, 40), strict=True))
    make_checkpoint(tmp_path, family="Qwen3VL", vocab_size=40, vision_ids=placed)
    (output,), _ = searches(tmp_path, [([1, 2], BeamSearchParams(40, 2))], max_logprobs=40)
    assert len(output.sequences) == 40
    assert not {36, 37} & {token for beam in output.sequences for token in beam.tokens}


def test_text_is_that_of_all_tokens(demo_tokenizer):
    prompts = ["ROMEO:\nBut soft", {"prompt": "JULIET:"}, [{"role": "user", "content": "Who?"}]]
    with LLM(str(DEMO), **short(skip_tokenizer_init=False)) as llm:
        params = BeamSearchParams(3, 8, ignore_eos=True)
        found = llm.beam_search(prompts, params, concurrency_limit=2)
        (alone,) = llm.beam_search(prompts[0], params)
        with pytest.raises(
            InvalidRequest, match="concurrency_limit must be an integer of at least 1"
        ):
            llm.beam_search(prompts, params, concurrency_limit=0)
    assert [b.tokens for b in alone.sequences] == [b.tokens for b in found[0].sequences]
    assert found[0].sequences[0].text.startswith("ROMEO:\nBut soft")
    for output in found:
        assert len(output.sequences) == 3
        for beam in output.sequences:
            assert beam.text == demo_tokenizer.decode(beam.tokens, skip_special_tokens=False)


@pytest.mark.parametrize("includes", [False, True])
def test_text_has_the_end_where_that_is_asked_for(demo_tokenizer, includes):
    params = BeamSearchParams(2, 64, length_penalty=0.0, include_stop_str_in_output=includes)
    with LLM(str(DEMO), **short(skip_tokenizer_init=False)) as llm:
        (output,) = llm.beam_search([[{"role": "user", "content": "Who is there?"}]], params)
    ended = [beam for beam in output.sequences if beam.finish_reason == "stop"]
    assert ended
    for beam in ended:
        assert beam.tokens[-1] == beam.stop_reason
        tokens = beam.tokens if includes else beam.tokens[:-1]
        assert beam.text == demo_tokenizer.decode(tokens, skip_special_tokens=False)
