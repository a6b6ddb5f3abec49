"""A whole decode step in one kernel, in an engine: what it says of tokens is as near to float32 as
what the operators say."""

import asyncio
import collections
import functools

import pytest
import torch

from nanoactor import SamplingParams
from nanoactor.models.devices.cuda.kernels.decode_step.steps import DecodeSteps
from tests.engine.harness import collect, engine, ids, ragged_prompts
from tests.models.checkpoints import make_checkpoint

EXPERTS = dict(
    num_experts=16, num_experts_per_tok=8, moe_intermediate_size=256, norm_topk_prob=True
)
MODELS = {
    "qwen3": dict(family="Qwen3", head_dim=128),
    "llama": dict(family="Llama"),
    "qwen2": dict(family="Qwen2"),
    "fp8": dict(family="Qwen3", head_dim=128, fp8_blocks=(128, 128)),
    "experts": dict(family="Qwen3Moe", head_dim=128, **EXPERTS),
    "experts in fp8": dict(family="Qwen3Moe", head_dim=128, fp8_blocks=(128, 128), **EXPERTS),
}
SIZES = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=6000)
HEADS = dict(num_attention_heads=16, num_key_value_heads=8)
"""Of 64 in Llama."""
FEW_HEADS = {"qwen2": dict(num_attention_heads=8, num_key_value_heads=2)}
PADDED = {3: 4}
"""Numbers of rows that are not captured, and the next larger one that is."""
CASES = [
    *((name, rows) for name in ("qwen3", "llama", "qwen2") for rows in (1, 2, 3, 8, 16)),
    *((name, rows) for name in ("fp8", "experts", "experts in fp8") for rows in (1, 3, 8)),
]
TOKENS = 70
"""So that sequences of 64-token blocks grow into a new one."""
PROMPTS = ragged_prompts(6000, [17, 300, 64, 1, 63, 65, 128, 700] * 2, seed=3)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Random weights of a scale that keeps activations of the order of 1, in bfloat16."""

    @functools.cache
    def made(name):
        where = tmp_path_factory.mktemp("model")
        options = SIZES | HEADS | FEW_HEADS.get(name, {}) | MODELS[name]
        options |= dict(max_position_embeddings=4096)
        make_checkpoint(where, dtype=torch.bfloat16, scale=1 / 32, **options)
        return where

    return made


def answers(directory, rows, **options):
    """Tokens of all prompts, so many of which decode together, and what they say of them."""
    params = dict(temperature=1.0, ignore_eos=True, max_tokens=TOKENS, logprobs=0)

    async def main():
        async with on_gpu(directory, dtype="bfloat16", **options) as llm:
            requests = [
                (ids(prompt), SamplingParams.for_model(seed=n, **params))
                for n, prompt in enumerate(PROMPTS)
            ]
            outputs = []
            for first in range(0, len(requests), rows):
                group = requests[first : first + rows]
                outputs += await asyncio.gather(*(collect(llm, *request) for request in group))
            return [output.outputs[0] for output in outputs]

    return asyncio.run(main())


def on_gpu(directory, **options):
    limits = dict(num_kv_blocks=400, max_num_batched_tokens=2048, max_num_seqs=16)
    return engine(directory, device="cuda", debug=False, threads=None, **limits, **options)


def error(directory, found):
    """The mean distance of their log-probabilities from those that float32 gives the same tokens
    behind the same tokens."""

    async def main():
        whole, total = SamplingParams.for_model(max_tokens=1, temperature=0, prompt_logprobs=0), 0.0
        async with on_gpu(directory, dtype="float32") as llm:
            for prompt, answer in zip(PROMPTS, found, strict=True):
                again = await collect(llm, ids([*prompt, *answer.token_ids]), whole)
                told = again.prompt_logprobs[len(prompt) :]
                for token, own, exact in zip(answer.token_ids, answer.logprobs, told, strict=True):
                    total += abs(own[token].logprob - exact[token].logprob)
        return total / (len(PROMPTS) * TOKENS)

    return asyncio.run(main())


def count_kernels(monkeypatch):
    """By number of rows, how many steps run in the kernel."""
    found, run = collections.Counter(), DecodeSteps.run

    def counted(self, buffers, slots, *others):
        result = run(self, buffers, slots, *others)
        found[len(slots)] += result is not None
        return result

    monkeypatch.setattr(DecodeSteps, "run", counted)
    return found


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_the_kernel_is_no_further_from_float32_than_the_operators(
    directories, monkeypatch, name, rows
):
    """With experts, a choice that rounding changes is a part of both distances."""
    directory, ran = directories(name), count_kernels(monkeypatch)
    kernel = error(directory, answers(directory, rows, decode_kernel=True))
    assert ran[PADDED.get(rows, rows)] > 0, "captured with the kernel"
    ran.clear()
    operators = error(directory, answers(directory, rows, decode_kernel=False))
    assert not +ran
    assert 0 < kernel < 1.1 * operators, (kernel, operators)
