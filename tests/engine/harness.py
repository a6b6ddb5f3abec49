"""Engines for tests: small random checkpoints, the reference check, and how to collect."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from pathlib import Path

import numpy as np

from nanoactor import AsyncLLM, EngineConfig, SamplingParams
from nanoactor.model_files.files import read_model_files
from nanoactor.runner.config import RankConfig
from nanoactor.setup.actors import ActorConfig

TIE = 1e-4


def options(**changes):
    """Options of a small float32 engine in which every invariant is watched.

    Its actors share the test's process unless there are several ranks: what processes of their
    own add is for tests that say so, since each start of one takes seconds of a core.
    """
    several = changes.get("tensor_parallel_size", 1) > 1
    values = dict(
        placement="default" if several else "single",
        device="cpu",
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=64,
        num_kv_blocks=256,
        skip_tokenizer_init=True,
        debug=True,
        threads=1,
        seed=0,
        start_timeout=240.0,
    )
    return {**values, **changes}


def short(**changes):
    """The same for the demo model, of whose context so small a cache holds a part."""
    return options(**{"max_model_len": 1024, **changes})


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def rank_config(directory, rank=0, **options):
    """What a runner is told, for an executor without an engine."""
    config = EngineConfig(str(directory), threads=1, skip_tokenizer_init=True, **options)
    return RankConfig(ActorConfig(config, read_model_files(config), bytes(16)), rank)


async def collect(llm, prompt, params=None, **kwargs):
    """The last output of a request."""
    final = None
    async for output in llm.generate(prompt, params, **kwargs):
        final = output
    return final


def ids(tokens):
    return {"prompt_token_ids": [int(token) for token in tokens]}


def ragged_prompts(vocabulary, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


@contextlib.asynccontextmanager
async def engine(directory: Path | str, **changes):
    """A started engine that must be idle and balanced when it is left."""
    made = short if Path(directory).name == "demo" else options
    async with AsyncLLM(str(directory), **made(**changes)) as llm:
        yield llm
        await settled(llm)


async def settled(llm):
    """Wait until nothing is held anywhere, and assert that it comes to that."""
    deadline = time.monotonic() + 20
    while True:
        figures = await llm.statistics()
        held = _held(figures)
        if held is not None and not any(held):
            return figures
        assert time.monotonic() < deadline, f"something is still held: {held}"
        await asyncio.sleep(0.02)


def _held(figures):
    """What is still held; None where an actor was too busy to answer."""
    if not {"scheduler", "blocks", "detokenizer", "frontend"} <= set(figures):
        return None
    scheduler, blocks = figures["scheduler"]["actor"], figures["blocks"]["actor"]
    detokenizer, frontend = figures["detokenizer"]["actor"], figures["frontend"]["actor"]
    return (
        scheduler["live"],
        scheduler["tombstones"],
        blocks["held_slots"],
        detokenizer["entries"],
        detokenizer["pending"],
        frontend["entries"],
        frontend["waiting_requests"],
        frontend["waiting_tokens"],
        scheduler["blocks"] - scheduler["credits"],
        scheduler["blocks"] - blocks["available"],
    )


class Reference:
    """transformers on the same weights, float32, CPU: what every greedy token is held against."""

    def __init__(self, model):
        self.model = model.eval()
        self.positions = self.ties = 0

    def check(self, prompt, output):
        """Every token is the arg-max of one forward pass over prompt and output.

        Positions where the two best logits differ by less than TIE may go either way.
        """
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *output]])).logits[0].float()
        rows = logits[len(prompt) - 1 : len(prompt) + len(output) - 1]
        best = rows.topk(2).values
        ties = (best[:, 0] - best[:, 1] < TIE).tolist()
        expected = rows.argmax(-1).tolist()
        wrong = [i for i, tie in enumerate(ties) if expected[i] != output[i] and not tie]
        assert not wrong, f"positions {wrong[:5]}: {output} is not {expected}"
        self.positions += len(ties)
        self.ties += sum(ties)

    def conclude(self):
        """With more than 1 % ties the comparison would show nothing."""
        assert self.positions > 0
        assert self.ties <= 0.01 * self.positions, f"{self.ties} ties in {self.positions}"


def greedy(tokens, **changes):
    return SamplingParams.for_model(temperature=0.0, max_tokens=tokens, ignore_eos=True, **changes)
