"""How fast it is, with random weights of Qwen3-0.6B; measured as `bench/gpu.py` does, judged by
nobody."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.gpu import MODELS, Bench, workload_lengths
from nanoactor import AsyncLLM
from tests.npu.smoke_checks.frame import Check, Rig

BATCHES = (1, 16, 64, 256)
PROMPT = 256
OUTPUTS = (64, 192)
"""The time of a step comes from the difference of these lengths."""
Measure = Callable[[Bench], Awaitable[str]]


def written(scratch: Path, model: dict[str, Any]) -> Path:
    """A directory with a configuration alone."""
    directory = scratch / "dummy"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model))
    return directory


async def measure(directory: Path, what: Measure, **options: Any) -> str:
    """On a new engine."""
    rounds = argparse.Namespace(rounds=1, rounds_256=None)
    fixed = dict(load_format="dummy", skip_tokenizer_init=True, start_timeout=1800.0)
    async with AsyncLLM(str(directory), **{**fixed, **options}) as llm:
        return await what(Bench(llm, rounds))


async def step(rows: int, rounds: int, bench: Bench) -> str:
    """Of decoding."""
    few, many = OUTPUTS
    await bench.generate([PROMPT] * rows, [8] * rows, 0.0)
    times = []
    for _ in range(rounds):
        long = await bench.generate([PROMPT] * rows, [many] * rows, 0.0)
        brief = await bench.generate([PROMPT] * rows, [few] * rows, 0.0)
        times.append((long - brief) / (many - few) * 1e3)
    milliseconds = statistics.median(times)
    rate = rows / milliseconds * 1e3
    return f"{milliseconds:.3f} ms per step, {rate:,.0f} tokens/s (prompts of {PROMPT} tokens)"


async def workload(share: int, bench: Bench) -> str:
    """nano-vllm's, after a few tokens of as many prompts. `share`: every so many sequences."""
    lengths, outputs = (numbers[::share] for numbers in workload_lengths())
    await bench.generate(lengths, [8] * len(outputs), 0.6)
    seconds = await bench.generate(lengths, outputs, 0.6)
    rate = sum(outputs) / seconds
    return (
        f"{rate:,.0f} tokens/s: {sum(outputs)} tokens of {len(outputs)} prompts in {seconds:.1f} s"
    )


def on_device(what: Measure, rig: Rig) -> str:
    """With the engine's defaults."""
    options = dict(device=rig.name, graph_mode=rig.graph_mode, max_model_len=4096)
    directory = written(rig.scratch, MODELS["0.6b"])
    said = asyncio.run(measure(directory, what, max_num_batched_tokens=16384, **options))
    return f"{said}; graph mode {rig.graph_mode}"


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    nothing = "there is nothing to measure" if rig.emulated else ""
    make = functools.partial(Check, alone=True, seconds=2400, figure=True, skip=nothing)
    rounds = 1 if rig.quick else 3
    steps = {f"figure: decode, batch {n}": functools.partial(step, n, rounds) for n in BATCHES}
    name = "figure: nano-vllm's workload" + (", every eighth sequence" if rig.quick else "")
    every = {**steps, name: functools.partial(workload, 8 if rig.quick else 1)}
    return [make(name, functools.partial(on_device, what)) for name, what in every.items()]
