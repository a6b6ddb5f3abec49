"""What is left out means vLLM's defaults by hand, and the model's where nothing is given; tokens
tell, at each door."""

import asyncio
import logging
import subprocess
import sys

import httpx2 as httpx
import pytest

from nanoactor import LLM, AsyncLLM, SamplingParams
from nanoactor.admission import request as request_module
from tests.server.harness import here, url

PROMPT = "ROMEO:"
BY_HAND = dict(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)
MODEL = dict(temperature=0.8, top_k=40, top_p=0.95)
"""What the demo's generation_config.json says."""
OPTIONS = dict(device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, seed=3)


def tokens(llm, params):
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def test_a_constructor_by_hand_has_vllms_defaults(llm):
    lengths = []
    for seed in range(4):
        named = tokens(llm, SamplingParams(seed=seed, max_tokens=16, **BY_HAND))
        assert tokens(llm, SamplingParams(seed=seed)) == named
        assert len(named) <= 16
        own = tokens(llm, SamplingParams.for_model(seed=seed, max_tokens=16))
        assert own == tokens(llm, SamplingParams(seed=seed, max_tokens=16, **MODEL))
        none = dict.fromkeys([*BY_HAND, "max_tokens"])
        whole = tokens(llm, SamplingParams(seed=seed, **none))
        assert whole == tokens(llm, SamplingParams.for_model(seed=seed))
        assert whole[: len(own)] == own
        lengths.append(len(whole))
    assert max(lengths) > 16
    assert llm.get_default_sampling_params() == SamplingParams.for_model()


@pytest.mark.drawn(2)
def test_no_parameters_are_the_models():
    """From equal seeds engines draw the same ones for requests without."""

    def one(ask):
        with LLM("demo", **OPTIONS) as llm:
            return ask(llm)

    drawn = one(lambda llm: llm.generate([PROMPT], use_tqdm=False)[0].outputs[0].token_ids)
    params = SamplingParams(max_tokens=None, **MODEL)
    assert list(drawn) == one(lambda llm: tokens(llm, params))

    async def stream():
        async with AsyncLLM("demo", **OPTIONS) as llm:
            async for output in llm.generate(PROMPT):
                last = output
            return list(last.outputs[0].token_ids)

    assert asyncio.run(stream()) == list(drawn)


@pytest.mark.long
def test_no_parameters_on_the_command_line_are_the_models():
    params = SamplingParams(seed=OPTIONS["seed"], max_tokens=None, **MODEL)  # `--seed` is its seed
    with LLM("demo", **OPTIONS) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    command = [sys.executable, "-m", "nanoactor", "generate", "demo", PROMPT]
    for name, value in OPTIONS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    assert output.outputs[0].text in done.stdout


def test_fields_left_out_over_http_are_the_models(llm):
    async def main():
        async with (
            here("demo", **OPTIONS) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            body = {"model": "demo", "prompt": PROMPT, "seed": 5}
            answer = (await client.post("/v1/completions", json=body)).json()
            return answer["choices"][0]["text"]

    params = SamplingParams(seed=5, max_tokens=16, **MODEL)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert asyncio.run(main()) == output.outputs[0].text


def test_vllms_defaults_may_be_those_of_the_engine(llm):
    with LLM("demo", generation_config="vllm", **OPTIONS) as other:
        open_ = SamplingParams.for_model(seed=1, max_tokens=16)
        assert tokens(other, open_) == tokens(llm, SamplingParams(seed=1))
        assert tokens(other, open_) != tokens(llm, open_)


def test_an_output_that_ends_by_a_length_that_was_not_written_is_logged_once(
    llm, caplog, monkeypatch
):
    monkeypatch.setattr(request_module, "_WARNED", [])
    with caplog.at_level(logging.WARNING, "nanoactor"):
        tokens(llm, SamplingParams(max_tokens=16, ignore_eos=True))
        tokens(llm, SamplingParams(max_tokens=None, ignore_eos=True))
        assert "max_tokens" not in caplog.text
        for _ in range(3):
            tokens(llm, SamplingParams(ignore_eos=True))
    assert caplog.text.count("ended after 16 tokens") == 1


def test_a_default_length_that_does_not_fit_is_cut(llm):
    prompt = {"prompt_token_ids": [5] * 60}
    (output,) = llm.generate([prompt], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
