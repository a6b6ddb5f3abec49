"""A whole decode step in one kernel, in an engine: what it chose is as likely by the operators."""

import asyncio
import json

import pytest

from nanoactor import SamplingParams
from tests.engine.harness import collect, engine, ids, ragged_prompts

SIZES = {
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128),
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=64),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
}
TOKENS = 70
"""So that sequences of 64-token blocks grow into a new one."""


def write_config(directory, name):
    sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=16, num_key_value_heads=8, vocab_size=6000)
    shared = dict(hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-6)
    shared |= dict(rope_theta=1e6, tie_word_embeddings=True, dtype="bfloat16", eos_token_id=0)
    (directory / "config.json").write_text(json.dumps({**sizes, **shared, **SIZES[name]}))
    return directory


def errors(directory, prompts, **options):
    """How far the log-probabilities of chosen tokens are from those that a prefill gives them."""
    params = dict(temperature=1.0, ignore_eos=True, max_tokens=TOKENS, logprobs=0)

    async def main():
        config = dict(device="cuda", dtype="bfloat16", load_format="dummy", num_kv_blocks=400)
        config |= dict(max_num_batched_tokens=2048, max_num_seqs=16, debug=False, threads=None)
        async with engine(directory, **config, **options) as llm:
            requests = [SamplingParams(seed=n, **params) for n in range(len(prompts))]
            pairs = zip(prompts, requests, strict=True)
            outputs = await asyncio.gather(*(collect(llm, ids(p), q) for p, q in pairs))
            found = []
            for prompt, output in zip(prompts, outputs, strict=True):
                (answer,) = output.outputs
                whole = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
                again = await collect(llm, ids([*prompt, *answer.token_ids]), whole)
                told = again.prompt_logprobs[len(prompt) :]
                for token, own, other in zip(answer.token_ids, answer.logprobs, told, strict=True):
                    found.append(abs(own[token].logprob - other[token].logprob))
            return found

    return asyncio.run(main())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("name", SIZES)
def test_what_the_kernel_chose_is_as_likely_by_the_operators(tmp_path, name, rows):
    """By its own account the kernel is no further from a prefill than the operators are."""
    directory = write_config(tmp_path, name)
    prompts = ragged_prompts(6000, [17, 300, 64, 1, 63, 65, 128, 700] * 2, seed=3)[:rows]
    kernel = errors(directory, prompts, decode_kernel=True)
    operators = errors(directory, prompts)
    assert len(kernel) == len(operators) == rows * TOKENS
    mean = sum(kernel) / len(kernel)
    assert mean < 1.3 * sum(operators) / len(operators) + 0.002
    assert max(kernel) < 2 * max(operators) + 0.02
