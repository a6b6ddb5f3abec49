"""The device as a whole: a model's logits, and engines whose tokens are compared."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import time
from pathlib import Path
from typing import Any

from nanoactor.models.options import ATTENTION_LAYOUTS
from tests.engine.harness import collect, engine, greedy, ids, ragged_prompts
from tests.npu.smoke_checks.frame import Check, Failed, Rig, Skipped, short
from tests.npu.smoke_checks.judge import CLEAR, MODEL, Judge, Model, checkpoint, on_cpu

TOKENS = 20
TYPICAL = 0.05
"""How far logits may be off in the root of the mean square, as a share of their deviation."""
COMPILED = ("max-autotune", "reduce-overhead")


def prompts_of(rig: Rig) -> list[list[int]]:
    """Some share their first block or two; one is cut into chunks; lengths grow into new blocks."""
    size = MODEL["vocab_size"]
    stem = ragged_prompts(size, [290], seed=1)[0]
    shared = [[*stem[:end], end % size, 5] for end in (130, 257)]
    lengths = [7, 126] if rig.quick else [7, 126, 140, 128, 125, 1]
    return [stem, *shared, *ragged_prompts(size, lengths, seed=2)]


@dataclasses.dataclass
class Run:
    """What an engine said."""

    tokens: list[list[int]]
    runner: dict[str, Any]
    warnings: list[str]
    start: float
    """Seconds."""


class Listener(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


async def generate(rig: Rig, **changes: Any) -> Run:
    """All prompts at once; those with a common beginning find it in the cache."""
    limits = dict(max_num_seqs=4, max_num_batched_tokens=160, max_model_len=384, num_kv_blocks=24)
    fixed = dict(device=rig.name, dtype=short(rig.dtype), placement="single", start_timeout=1500.0)
    begin = time.perf_counter()
    async with engine(checkpoint(rig), **{**limits, **fixed, **changes}) as llm:
        start, prompts = time.perf_counter() - begin, prompts_of(rig)
        await collect(llm, ids(prompts[0]), greedy(2))
        found = await asyncio.gather(*(collect(llm, ids(p), greedy(TOKENS)) for p in prompts))
        figures = await llm.statistics()
    tokens = [list(output.outputs[0].token_ids) for output in found]
    return Run(tokens, figures["runner.0"]["actor"], [], start)


def run(rig: Rig, **changes: Any) -> Run:
    """An engine from its start to its end, and what it warned of."""
    listener, logger = Listener(), logging.getLogger("nanoactor")
    logger.addHandler(listener)
    try:
        found = asyncio.run(generate(rig, **changes))
    finally:
        logger.removeHandler(listener)
    found.warnings = listener.said
    return found


def judge_of(rig: Rig) -> Judge:
    """For these prompts."""
    return Judge(on_cpu(checkpoint(rig)), prompts_of(rig))


def eager_tokens(rig: Rig, layout: str) -> list[list[int]]:
    """Of an engine without graphs, run once for all checks."""
    path = rig.scratch / f"eager-{layout}.json"
    if not path.exists():
        tokens = run(rig, graph_mode="eager", attention_layout=layout).tokens
        path.write_text(json.dumps(tokens))
    found: list[list[int]] = json.loads(path.read_text())
    return found


def logits(rig: Rig) -> str:
    """Of a prompt, against the CPU device in float32 on the same weights."""
    directory, prompt = checkpoint(rig), prompts_of(rig)[0]
    expected = on_cpu(directory).logits(prompt)
    with rig.device.stream():
        found = Model(directory, rig.device, rig.dtype).logits(prompt)
    deviation = expected.std(-1, keepdim=True)
    error = (found - expected) / deviation
    best = expected.topk(2).values
    clear = (best[:, 0] - best[:, 1]) / deviation[:, 0] > CLEAR
    wrong = int((found.argmax(-1) != expected.argmax(-1))[clear].sum())
    typical, worst = float(error.square().mean().sqrt()), float(error.abs().max())
    said = f"off by {typical:.4f} deviations, at most {worst:.3f}"
    if not (typical <= TYPICAL and worst <= CLEAR) or wrong:
        raise Failed(f"{said}; {wrong} of {int(clear.sum())} clear choices are other ones")
    return f"{said}; all {int(clear.sum())} clear choices of {len(prompt)} are the same"


def eager(layout: str, rig: Rig) -> str:
    """Against float32."""
    return judge_of(rig).right(eager_tokens(rig, layout))


def layouts(rig: Rig) -> str:
    """Both, against each other."""
    one, other = (eager_tokens(rig, layout) for layout in ATTENTION_LAYOUTS)
    return judge_of(rig).equal(one, other, ATTENTION_LAYOUTS[1])


def _cache(rig: Rig, mode: str, layout: str) -> Path:
    return rig.scratch / f"graphs-{mode}-{layout}"


def graphs(mode: str, layout: str, rig: Rig) -> str:
    """Every decode step is a graph, and tokens are those of the eager engine."""
    cache = str(_cache(rig, mode, layout))
    found = run(rig, graph_mode=mode, attention_layout=layout, graph_cache_dir=cache)
    all_captured(found)
    said = judge_of(rig).equal(found.tokens, eager_tokens(rig, layout), "eager's")
    return f"{said}; started in {found.start:.1f} s"


def all_captured(found: Run) -> None:
    """Raises `Failed` where a decode step ran operator by operator."""
    steps = found.runner["steps_uncaptured"]
    if steps:
        why = found.warnings[0] if found.warnings else "no warning says why"
        raise Failed(f"{steps} decode steps ran without a graph: {why}")


def second_start(rig: Rig) -> str:
    """Of max-autotune, in a process of its own: what the first one compiled is found."""
    cache = _cache(rig, "max-autotune", "tnd")
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("compiled_module")}
    if not before:
        raise Skipped("no first start has left graphs; --only max-autotune runs both")
    found = run(rig, graph_mode="max-autotune", graph_cache_dir=str(cache))
    all_captured(found)
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("compiled_module")}
    if after != before:
        raise Failed(f"{len(before)} graphs were there, {len(after)} are, or some are newer")
    if not any("that an earlier start compiled" in line for line in found.warnings):
        raise Failed("the engine does not say that it uses them")
    said = judge_of(rig).equal(found.tokens, eager_tokens(rig, "tnd"), "eager's")
    return f"{len(before)} graphs; {said}; started in {found.start:.1f} s"


def fractal(rig: Rig) -> str:
    """Weights in NZ."""
    found = run(rig, graph_mode="eager", weight_format="nz")
    return judge_of(rig).equal(found.tokens, eager_tokens(rig, "tnd"), "nd's")


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    make = functools.partial(Check, alone=True, seconds=900)
    found = [make("model: logits against the CPU in float32", logits)]
    chosen = ATTENTION_LAYOUTS[: 1 if rig.quick else None]
    for layout in chosen:
        found.append(make(f"engine: eager, {layout}", functools.partial(eager, layout)))
    if not rig.quick:
        found.append(make("engine: eager, tnd and bnsd", layouts))
    for mode in ("npugraph", *COMPILED):
        emulated = rig.emulated and mode in COMPILED
        limits = dict(seconds=1800, skip="torchair compiles for an NPU alone" * emulated)
        for layout in chosen:
            name, function = f"engine: {mode}, {layout}", functools.partial(graphs, mode, layout)
            found.append(make(name, function, **limits))
        if mode == "max-autotune":
            name = "engine: max-autotune, second start finds its graphs"
            found.append(make(name, second_start, **limits))
    return found


def fractal_checks() -> list[Check]:
    """Behind those of several devices."""
    return [Check("engine: weight_format nz", fractal, alone=True, seconds=900)]
