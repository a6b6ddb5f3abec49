"""Requests for vectors: texts, prompts before them, batches, aborts, deaths, damaged weights."""

import asyncio
import contextlib
import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from nanoactor import (
    LLM,
    AsyncLLM,
    ComputationFailed,
    EngineOverloaded,
    InvalidRequest,
    PoolingParams,
    RequestAborted,
)
from nanoactor.model_files.files import resolve_model
from nanoactor.options.pooling import PoolingConfig
from nanoactor.pooling.requests import prepend_prompt
from nanoactor.pooling.rerank import INSTRUCTION, judgement_prompt
from nanoactor.requests.pooling_outputs import cosine, match_probability, postprocess_vector
from tests.engine.harness import engine, ids, on_a_loop, ragged_prompts, settled, short
from tests.models.checkpoints import make_checkpoint
from tests.pooling.checkpoints import describe_pooling, make_embedder

PROMPTS = {"query": "Instruct: find\nQuery:", "document": ""}
CPU = dict(device="cpu", dtype="float32", threads=1, max_model_len=256, num_kv_blocks=128)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """The demo's weights and tokenizer, as an embedding model with prompts of its own."""
    directory, demo = tmp_path_factory.mktemp("embedder"), resolve_model("demo")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(demo / name)
    describe_pooling(directory, prompts=PROMPTS)
    return directory


# -- pure ---------------------------------------------------------------------------------


def test_a_prompt_goes_before_a_text_as_asked():
    pooling = PoolingConfig("last", prompts={"a": "A: ", "b": "B: "}, default_prompt="b")
    assert prepend_prompt("x", PoolingParams(), pooling) == "B: x"
    assert prepend_prompt("x", PoolingParams(prompt_name="a"), pooling) == "A: x"
    assert prepend_prompt("x", PoolingParams(prompt=""), pooling) == "x"
    assert prepend_prompt({"prompt": "x"}, PoolingParams(prompt="C"), pooling) == "Cx"
    assert prepend_prompt(ids([1]), PoolingParams(), pooling) == ids([1])
    for params, text in (
        (PoolingParams(prompt_name="c"), "x"),
        (PoolingParams(prompt="C"), ids([1])),
        (PoolingParams(), [{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(InvalidRequest):
            prepend_prompt(text, params, pooling)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(dimensions=0),
        dict(dimensions=1.5),
        dict(dimensions=True),
        dict(normalize="yes"),
        dict(prompt=3),
        dict(prompt="a", prompt_name="b"),
        dict(truncate_prompt_tokens=0),
        dict(truncate_prompt_tokens=-2),
    ],
)
def test_wrong_parameters_are_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        PoolingParams(**wrong)


def test_all_accepted_values_are_named():
    with pytest.raises(InvalidRequest, match="at least 1, -1 or None, got -2$"):
        PoolingParams(truncate_prompt_tokens=-2)
    assert PoolingParams(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1


def test_scores_are_those_of_the_models_card():
    text = judgement_prompt("who?", "me", None)
    assert f"<Instruct>: {INSTRUCTION}\n<Query>: who?\n<Document>: me<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<Instruct>: judge\n" in judgement_prompt("", "", "judge")
    assert match_probability(np.array([0, 0], np.float32)) == 0.5
    assert match_probability(np.array([1, 3], np.float32)) == pytest.approx(1 / (1 + np.exp(-2)))
    assert match_probability(np.array([3e38, -3e38], np.float32)) == pytest.approx(0, abs=1e-300)


def test_a_vector_of_zeros_stays_one():
    zeros = np.zeros(4, np.float32)
    assert (postprocess_vector(zeros, dimensions=None, normalize=True) == zeros).all()
    assert postprocess_vector(zeros, dimensions=2, normalize=False).shape == (2,)


# -- an engine ----------------------------------------------------------------------------


def test_texts_of_a_blocking_program(embedder):
    with LLM(str(embedder), placement="single", **CPU) as llm:
        texts = [f"text {number}" for number in range(40)]
        outputs = llm.embed(texts, use_tqdm=False)
        assert [len(output.outputs.embedding) for output in outputs] == [256] * len(texts)
        (alone,) = llm.embed(texts[7], use_tqdm=False)
        assert np.allclose(alone.outputs.embedding, outputs[7].outputs.embedding, atol=1e-5)
        (asked,) = llm.embed("text 7", PoolingParams(prompt_name="query"), use_tqdm=False)
        (plain,) = llm.embed("Instruct: find\nQuery:text 7", use_tqdm=False)
        assert asked.prompt_token_ids == plain.prompt_token_ids
        scores = llm.score("text 7", texts[:3], use_tqdm=False)
        pairs = zip(scores, outputs, strict=False)
        for score, output in pairs:
            right = cosine(asked.outputs.embedding, output.outputs.embedding)
            assert score.outputs.score == pytest.approx(right, abs=1e-5)
        with pytest.raises(InvalidRequest, match="2 queries and 3 documents"):
            llm.score(["a", "b"], texts[:3], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="instruction is supported only by rerankers"):
            llm.score("a", "b", instruction="c", use_tqdm=False)
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            llm.embed(["a", ""], use_tqdm=False)


@on_a_loop
async def test_a_queue_that_is_full_refuses_and_a_batch_waits(embedder):
    async with AsyncLLM(str(embedder), **short(pooling="last", max_waiting_requests=4)) as llm:
        calls = [llm.embed(ids([number + 1])) for number in range(64)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in results if isinstance(one, EngineOverloaded)]
        assert refused
        assert len(refused) < len(calls)
        await settled(llm)


@on_a_loop
async def test_vectors_may_be_aborted_or_given_up(embedder):
    options = short(device="simulated:5", max_num_batched_tokens=32)
    async with AsyncLLM(str(embedder), **options) as llm:
        prompts = ragged_prompts(1000, [200] * 6)
        tasks = [
            asyncio.ensure_future(llm.embed(ids(prompt), request_id=f"v{number}"))
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0.02)
        await llm.abort("v5")
        await llm.abort("v0")
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = [type(one) for one in done]
        assert kinds[1] is asyncio.CancelledError
        assert kinds[5] is RequestAborted
        assert len(done[2].outputs.embedding) == len(done[4].outputs.embedding) == 256
        with pytest.raises(InvalidRequest, match="is already in use"):
            first = asyncio.ensure_future(llm.embed(ids(prompts[0]), request_id="same"))
            await asyncio.sleep(0)
            try:
                await llm.embed(ids(prompts[0]), request_id="same")
            finally:
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await first
        await settled(llm)


@pytest.mark.deadly
@pytest.mark.timeout(300)
@on_a_loop
async def test_vectors_come_though_processes_die(tmp_path):

    make_embedder(tmp_path, "mean_tokens")
    prompts = ragged_prompts(211, (90, 60, 99, 5, 77, 42), seed=2) * 4
    changes = dict(max_num_batched_tokens=16, max_num_seqs=8, placement="default", debug=False)
    async with engine(tmp_path, **changes) as llm:
        right = [await llm.embed(ids(prompt)) for prompt in prompts[:6]]
        for victim in ("runner.0", "control", "detokenizer"):
            tasks = [asyncio.ensure_future(llm.embed(ids(prompt))) for prompt in prompts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(llm.pids[victim], signal.SIGKILL)
            for number, output in enumerate(await asyncio.gather(*tasks)):
                due = right[number % 6].outputs.embedding
                assert np.allclose(output.outputs.embedding, due, atol=1e-5)
        assert sum(llm.restarts[0].values()) == 3


@on_a_loop
async def test_vectors_that_are_no_numbers_fail_their_requests_alone(tmp_path):
    make_embedder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embed_tokens.weight"][77] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    async with engine(tmp_path, check_weights=False) as llm:
        texts = [[1, 2, 3], [4, 5, 77], [6, 7], [77], [8] * 50]
        calls = [llm.embed(ids(text)) for text in texts]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, ComputationFailed) for one in done] == [0, 1, 0, 1, 0]
        assert all(np.isfinite(done[at].outputs.embedding).all() for at in (0, 2, 4))


def test_a_reranker_judges_by_its_words(tmp_path):
    """From texts to a probability, as transformers computes it with the same prompt."""
    model = make_checkpoint(tmp_path, vocab_size=2049)
    demo = resolve_model("demo")
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    tokenizer["added_tokens"].append(dict(id=2048, content="yes", **plain))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").symlink_to(demo / "tokenizer_config.json")
    with LLM(str(tmp_path), placement="single", pooling="yes_no", **CPU) as llm:
        documents = ["It is the east.", "and Juliet is the sun " * 3]
        scores = llm.score("what light?", documents, instruction="judge", use_tqdm=False)
        for document, output in zip(documents, scores, strict=True):
            text = judgement_prompt("what light?", document, "judge")
            reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
            ids, words = reader.encode(text).ids, list(map(reader.token_to_id, ("no", "yes")))
            assert output.prompt_token_ids == ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1, words]
            right = float(logits.softmax(-1)[1])
            assert output.outputs.score == pytest.approx(right, abs=1e-5)
        with pytest.raises(InvalidRequest, match="scores of pairs, not vectors"):
            llm.embed("a", use_tqdm=False)
