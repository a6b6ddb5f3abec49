"""Positions that beam search computes for each beam and step: counts, not times.

    python bench/beams.py

Compares held answers, as `AsyncLLM.beam_search` uses them, with a request of one token for each
beam and step on the prefix cache, as it did before. Both find the same sequences.
"""

from __future__ import annotations

import asyncio
from typing import Any

from nanoactor import AsyncLLM, BeamSearchParams, EngineConfig, SamplingParams
from nanoactor.beams.search import BeamSearch, candidates_per_beam

MODEL, TOKENS, WIDTHS, BLOCK_SIZES = "models/demo", 64, (2, 4, 8), (16, 128)
PROMPTS = ["ROMEO:\nBut soft, what light", "To be, or not", "KING RICHARD III:\nNow is the winter"]


async def by_requests(llm: AsyncLLM, prompt: str, params: BeamSearchParams) -> list[list[int]]:
    """Search with a request of one token for each beam and step."""
    count = candidates_per_beam(params, llm.files.eos_token_ids)
    one = SamplingParams.for_model(temperature=0.0, max_tokens=1, logprobs=count, ignore_eos=True)
    search: BeamSearch | None = None
    while search is None or not search.is_over:
        prompts: list[Any] = [prompt]
        if search is not None:
            prompts = [{"prompt_token_ids": beam.tokens} for beam in search.live]
        told = []
        for request in llm.submit(prompts, one):
            output = [output async for output in request][-1]
            assert output.outputs[0].logprobs is not None
            told.append(output.outputs[0].logprobs[0])
        if search is None:
            search = BeamSearch(output.prompt_token_ids, params, llm.files.eos_token_ids)
        search.advance(told)
    return [beam.tokens for beam in search.result().sequences]


async def counted(llm: AsyncLLM) -> dict[str, Any]:
    """Return the scheduler's counts."""
    figures: dict[str, Any] = (await llm.statistics())["scheduler"]["actor"]
    return figures


async def measure(block_size: int, width: int, held: bool) -> tuple[list[list[list[int]]], str]:
    """Return what is found, and what it costs."""
    params = BeamSearchParams(beam_width=width, max_tokens=TOKENS, ignore_eos=True)
    config = EngineConfig(MODEL, device="cpu", dtype="float32", block_size=block_size)
    async with AsyncLLM(config) as llm:
        found, prompts = [], 0
        before = await counted(llm)
        for prompt in PROMPTS:
            if held:
                output = await llm.beam_search(prompt, params)
                found.append([beam.tokens for beam in output.sequences])
            else:
                found.append(await by_requests(llm, prompt, params))
            prompts += len(found[-1][0]) - TOKENS
        after = await counted(llm)
    computed = after["prefill_tokens"] - before["prefill_tokens"] - prompts
    steps = len(PROMPTS) * width * (TOKENS - 1)
    told = f"{computed:7d} positions, {computed / steps:5.2f} for each beam and step"
    if held:
        stayed, forked = after["held_stayed"], after["held_forked"]
        told += f"; {stayed} beams stayed, {forked} were forked"
    return found, told


async def main() -> None:
    """Print a line for each way, width and block size."""
    for block_size in BLOCK_SIZES:
        for width in WIDTHS:
            one, before = await measure(block_size, width, held=False)
            other, after = await measure(block_size, width, held=True)
            print(f"blocks of {block_size}, {width} beams")
            print(f"  requests: {before}\n  held:     {after}")
            print(f"  the same sequences: {one == other}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
