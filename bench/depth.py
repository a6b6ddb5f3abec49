"""Measure what pipeline depth 2 gains over depth 1 on this machine, with the demo model.

    python bench/depth.py [--requests 32] [--rounds 3] [--out FILE]

The engines, each with a process tree of its own, alternate, so that a noisy machine hurts
both. Reported per depth: output tokens/s, device busy share (time in which torch
computed, by the runner's clock, over wall time), and the ratio of the medians. On a CPU
the "device" shares its cores with the actors, so depth 2 gains less here than with an
accelerator.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

import nanoactor
from nanoactor import AsyncLLM, SamplingParams


async def collect(llm, number, tokens):
    params = SamplingParams.for_model(max_tokens=tokens, ignore_eos=True, seed=number)
    async for output in llm.generate(f"SPEAKER {number}:", params):
        final = output
    return len(final.outputs[0].token_ids)


async def round_of(llm, requests, tokens):
    """(output tokens/s, device busy share) of one batch."""
    before = (await llm.statistics())["runner.0"]["actor"]["busy_seconds"]
    begin = time.monotonic()
    done = await asyncio.gather(*(collect(llm, n, tokens) for n in range(requests)))
    seconds = time.monotonic() - begin
    busy = (await llm.statistics())["runner.0"]["actor"]["busy_seconds"] - before
    return sum(done) / seconds, busy / seconds


async def measure(args):
    depths = {}
    async with (
        AsyncLLM("demo", pipeline_depth=1, max_num_seqs=args.requests) as one,
        AsyncLLM("demo", pipeline_depth=2, max_num_seqs=args.requests) as two,
    ):
        engines = {1: one, 2: two}
        for depth, llm in engines.items():
            await round_of(llm, args.requests, 16)  # warm
            depths[depth] = []
        for _ in range(args.rounds):
            for depth, llm in engines.items():
                depths[depth].append(await round_of(llm, args.requests, args.tokens))
    return depths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    depths = asyncio.run(measure(args))
    medians = {d: statistics.median(rate for rate, _ in rounds) for d, rounds in depths.items()}
    result = {
        "question": "what does pipeline depth 2 gain over depth 1 (demo model, CPU)?",
        "command": f"python bench/depth.py --requests {args.requests} --tokens {args.tokens} "
        f"--rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cores": len(os.sched_getaffinity(0)),
        "depths": {
            depth: {
                "output_tokens_per_s": [round(rate, 1) for rate, _ in rounds],
                "device_busy_share": [round(share, 3) for _, share in rounds],
            }
            for depth, rounds in depths.items()
        },
        "gain_of_depth_2": round(medians[2] / medians[1], 3),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
