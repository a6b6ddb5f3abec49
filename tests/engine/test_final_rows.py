"""Where nobody reads the hidden states of a prompt's other tokens, the last layer has none."""

import asyncio

import pytest

from nanoactor import SamplingParams
from nanoactor.models.decoder import Decoder
from tests.engine.harness import Reference, collect, engine, ids, ragged_prompts
from tests.engine.test_logprobs import ScoredReference
from tests.models.checkpoints import make_checkpoint

VOCABULARY = 211


@pytest.fixture
def rows(monkeypatch):
    """Of each forward pass: its tokens, and the rows that the last layer computed."""
    found, forward = [], Decoder.forward

    def noted(self, inputs):
        hidden = forward(self, inputs)
        found.append((len(inputs.token_ids), len(hidden)))
        return hidden

    monkeypatch.setattr(Decoder, "forward", noted)
    return found


def run(directory, requests, **changes):
    async def main():
        async with engine(directory, **changes) as llm:
            return await asyncio.gather(*(collect(llm, ids(p), q) for p, q in requests))

    return asyncio.run(main())


def test_chunks_of_prompts_compute_what_samples_alone(tmp_path, rows):
    """A chunk that does not end its prompt has no final row; decode rows have one each. Greedy
    tokens alone would not tell that a row does not see itself: log-probabilities do."""
    reference = ScoredReference(make_checkpoint(tmp_path))
    prompts = ragged_prompts(VOCABULARY, [50, 30, 9])
    params = SamplingParams.for_model(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    found = run(tmp_path, [(p, params) for p in prompts], max_num_batched_tokens=32)
    for prompt, output in zip(prompts, found, strict=True):
        reference.check(prompt, output.outputs[0].token_ids)
        reference.check_output(output, params)
    prefills = [(tokens, final) for tokens, final in rows if tokens > 8]
    assert (32, 0) in prefills, "the first 32 tokens of 50"
    assert any(0 < final < tokens // 2 for tokens, final in prefills)
    assert all(final < tokens for tokens, final in prefills[-3:])


@pytest.mark.parametrize("changes", [dict(prompt_logprobs=1), dict(n=2)], ids=str)
def test_prompts_that_are_scored_are_computed_whole_and_copies_sample_their_source(
    tmp_path, rows, changes
):
    reference = Reference(make_checkpoint(tmp_path))
    (prompt,) = ragged_prompts(VOCABULARY, [25])
    (output,) = run(
        tmp_path, [(prompt, SamplingParams.for_model(temperature=0, max_tokens=4, **changes))]
    )
    for answer in output.outputs:
        reference.check(prompt, answer.token_ids)
    scored = "prompt_logprobs" in changes
    assert (25, 25 if scored else 2) in rows
