"""What an engine can need is compiled before it is ready: no stream waits for a compilation."""

import asyncio
import os
import subprocess
import sys
from random import Random

import pytest
import torch

from nanoactor import AsyncLLM, SamplingParams
from tests.engine.harness import collect, ids
from tests.models.checkpoints import make_checkpoint

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "cache",
}
"""Where compilers keep what they have made, each in a new directory."""
KINDS = (
    dict(),
    dict(temperature=0.0),
    dict(temperature=0.0, structured_outputs={"regex": "[a-z]+"}),
    dict(structured_outputs={"json": {"type": "object"}}),
    dict(logit_bias={5: 1.0}, presence_penalty=1.0, repetition_penalty=1.2),
    dict(bad_words=["the"], top_k=5, top_p=0.9, min_p=0.1),
    dict(logprobs=3, n=3),
    dict(prompt_logprobs=2),
    dict(min_tokens=2, allowed_token_ids=list(range(100))),
)
MODELS = {
    "dense": dict(family="Qwen3", intermediate_size=1024, num_key_value_heads=4),
    "many heads": dict(family="Qwen3", intermediate_size=1024, num_key_value_heads=16),
    "experts": dict(
        family="Qwen3Moe",
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        num_key_value_heads=4,
    ),
}
SIZES = dict(
    hidden_size=512, num_hidden_layers=2, vocab_size=4096, head_dim=128, num_attention_heads=16
)


def files(root):
    return {os.path.join(where, name) for where, _, names in os.walk(root) for name in names}


def check(before, root):
    """Names of files in Triton's cache begin with those of kernels."""
    assert before, "the caches are elsewhere"
    added = sorted(os.path.basename(path) for path in files(root) - before)
    assert not added, added


async def use(root, **options):
    """Everything that can be asked for, with the demo model."""
    async with AsyncLLM("demo", **options) as llm:
        before = files(root)
        for kind in KINDS:
            for prompt in ("ROMEO:", "To be, or not to be. " * 60):
                await collect(llm, prompt, SamplingParams(max_tokens=6, seed=1, **kind))
        many = [collect(llm, f"{n}", SamplingParams(max_tokens=20, seed=n)) for n in range(40)]
        await asyncio.gather(*many)
        check(before, root)


async def use_many(root, directory, **options):
    """Steps of all sizes: up to 320 rows that decode, between prompts of 1 to 3,000 tokens."""
    async with AsyncLLM(directory, skip_tokenizer_init=True, **options) as llm:
        before = files(root)
        random = Random(1)
        for streams, longest, tokens in (
            (1, 3000, 5),
            (40, 3000, 40),
            (320, 60, 70),
            (320, 900, 90),
        ):
            many = [
                collect(
                    llm,
                    ids([random.randrange(4096) for _ in range(random.randint(1, longest))]),
                    SamplingParams(max_tokens=random.randint(1, tokens), seed=n, ignore_eos=True),
                )
                for n in range(streams)
            ]
            await asyncio.gather(*many)
        check(before, root)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_request_on_a_gpu_is_the_first_to_need_a_kernel(tmp_path, dtype):
    """Counted in files of Triton's, Inductor's and CUDA's caches, which begin empty."""
    run(tmp_path, f"use({str(tmp_path)!r}, device='cuda', dtype={dtype!r})")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_of_any_size_is_the_first_to_need_a_kernel(tmp_path, model, fp8):
    directory, caches = tmp_path / "model", tmp_path / "caches"
    sizes = dict(SIZES, **MODELS[model], max_position_embeddings=4096)
    blocks = (128, 128) if fp8 else None
    make_checkpoint(directory, dtype=torch.bfloat16, scale=1 / 32, fp8_blocks=blocks, **sizes)
    limits = dict(device="cuda", max_num_seqs=320, num_kv_blocks=8000, max_num_batched_tokens=4096)
    run(caches, f"use_many({str(caches)!r}, {str(directory)!r}, **{limits!r})")


def run(root, call):
    """Run a function of this module in a new process whose compilers' caches are in `root`."""
    caches = {name: str(root / place) for name, place in CACHES.items()}
    program = f"import asyncio; from tests.engine.test_first_use import *; asyncio.run({call})"
    environment = {**os.environ, **caches}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=500)
