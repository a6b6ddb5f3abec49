"""What an engine can need is compiled before it is ready: no stream waits for a compilation."""

import asyncio
import os
import subprocess
import sys

import pytest

from nanoactor import AsyncLLM, SamplingParams
from tests.engine.harness import collect

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


def files(root):
    return sum(len(names) for _, _, names in os.walk(root))


async def use(root, **options):
    async with AsyncLLM("demo", **options) as llm:
        before = files(root)
        for kind in KINDS:
            for prompt in ("ROMEO:", "To be, or not to be. " * 60):
                await collect(llm, prompt, SamplingParams(max_tokens=6, seed=1, **kind))
        many = [collect(llm, f"{n}", SamplingParams(max_tokens=20, seed=n)) for n in range(40)]
        await asyncio.gather(*many)
        print("compiled before", before, "and after", files(root))
        assert before > 0, "the caches are elsewhere"
        assert files(root) == before


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_request_on_a_gpu_is_the_first_to_need_a_kernel(tmp_path, dtype):
    """Counted in files of Triton's, Inductor's and CUDA's caches, which begin empty."""
    caches = {name: str(tmp_path / place) for name, place in CACHES.items()}
    program = (
        "import asyncio; from tests.engine.test_first_use import use; "
        f"asyncio.run(use({str(tmp_path)!r}, device='cuda', dtype={dtype!r}))"
    )
    environment = {**os.environ, **caches}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=500)
