"""Measure how much of the engine's own work is hidden behind the device.

    python bench/overlap.py [--sequences 1 16 64 256 1024] [--ms 1 5 10] [--seconds 2] [--rounds 3]
                            [--out FILE] [--plot FILE] [--trace FILE]

The device is simulated: a step starts when it was submitted or when the one before has ended, takes
a fixed time, and costs no CPU. What it idles is what the engine's own work adds. All sequences run
all the time; a window in the middle is measured. Compared are pipeline depth 1 and 2, eager and
late planning, and a loop in one process that schedules, runs and postprocesses one after the other,
with the same scheduler, block manager, batch state and detokenizer on the same device.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams
from nanoactor.model_files.files import DEMO, resolve_model
from nanoactor.options.config import EngineConfig
from nanoactor.runtime.tracing import nanoseconds_per_span

PROMPT = 32


@dataclasses.dataclass(frozen=True)
class Mode:
    """One contender."""

    name: str
    depth: int = 2
    plan_lead: str = "eager"


ENGINE_MODES = (
    Mode("depth 1", depth=1),
    Mode("depth 2"),
    Mode("depth 2, late", plan_lead="late"),
)


def model_directory(target: Path) -> Path:
    """The demo model's tokenizer under a configuration that allows long outputs; no weights."""
    demo = resolve_model(DEMO)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, target / name)
    config = json.loads((demo / "config.json").read_text())
    config["max_position_embeddings"] = 32768
    (target / "config.json").write_text(json.dumps(config))
    return target


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + position) % 2000 + 3 for position in range(PROMPT)]


def params_of(number: int) -> SamplingParams:
    return SamplingParams.for_model(
        max_tokens=30_000, ignore_eos=True, seed=number, output_kind=RequestOutputKind.DELTA
    )


def options_of(sequences: int, milliseconds: float, mode: Mode) -> dict:
    return {
        "device": f"simulated:{milliseconds:g}",
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(2048, 2 * sequences),
        "pipeline_depth": mode.depth,
        "plan_lead": mode.plan_lead,
        # Enough for what a window can put out; the cache's bookkeeping is part of what is measured.
        "num_kv_blocks": sequences * 1024 + 2048,
    }


# -- the engine ---------------------------------------------------------------------------


async def consume(llm: AsyncLLM, number: int, hog: float = 0.0) -> None:
    async for _ in llm.generate({"prompt_token_ids": prompt_of(number)}, params_of(number)):
        pass


async def ttft(llm: AsyncLLM) -> float:
    """Of one more request, which the engine has a place for."""
    params = dataclasses.replace(params_of(0), max_tokens=1)
    async for output in llm.generate({"prompt_token_ids": prompt_of(9999)}, params):
        final = output
    return final.metrics.time_to_first_token


def figures(statistics_: dict) -> dict:
    runner = statistics_["runner.0"]["actor"]
    scheduler = statistics_["scheduler"]["actor"]
    nodes = {row["node"]["name"]: row["node"]["cpu_seconds"] for row in statistics_.values()}
    return {
        "busy": runner["busy_seconds"],
        "idle": runner["idle_seconds"],
        "steps": runner["steps_done"],
        "tokens": scheduler["decode_tokens"],
        "cpu": nodes,
    }


async def hog_loop(milliseconds: float) -> None:
    """A consumer that keeps the user's loop to itself for so long at a time."""
    while True:
        time.sleep(milliseconds / 1000)  # noqa: ASYNC251 - the point
        await asyncio.sleep(milliseconds / 1000)


async def measure_engine(
    directory: Path, sequences: int, milliseconds: float, mode: Mode, args, hog: float = 0.0
) -> dict:
    options = options_of(sequences + 1, milliseconds, mode)
    async with AsyncLLM(str(directory), **options) as llm:
        tasks = [asyncio.create_task(consume(llm, number)) for number in range(sequences)]
        if hog:
            tasks.append(asyncio.create_task(hog_loop(hog)))
        while (await llm.statistics())["scheduler"]["actor"]["running"] < sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.4)
        gc.collect()
        before = figures(await llm.statistics())
        await asyncio.sleep(args.seconds)
        after = figures(await llm.statistics())
        trace = await llm.trace()
        first_tokens = [await ttft(llm) for _ in range(5)] if not hog else [0.0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    busy, idle, steps, tokens = (after[k] - before[k] for k in ("busy", "idle", "steps", "tokens"))
    cpu = {name: after["cpu"][name] - before["cpu"][name] for name in after["cpu"]}
    summary = trace.summary()
    spans = sum(len(track.spans) for node in trace.nodes for track in node.tracks)
    return {
        "idle": idle / (busy + idle),
        "rows_per_step": tokens / steps,
        "steps_per_s": steps / (busy + idle),
        "tokens_per_s": tokens / (busy + idle),
        "ttft_ms": statistics.median(first_tokens) * 1000,
        "cpu_us_per_token": sum(cpu.values()) / tokens * 1e6,
        "cpu_ms_per_step": sum(cpu.values()) / steps * 1e3,
        "cpu_us_per_token_by_process": {k: v / tokens * 1e6 for k, v in cpu.items()},
        "hidden": summary.hidden,
        "bottleneck": summary.bottleneck,
        "spans_per_step": spans / max(1, summary.steps),
    }, trace


# -- the loop in one process --------------------------------------------------------------


class InProcessLoop:
    """Schedule, run and postprocess in sequence; the engine's own logic without its actors."""

    def __init__(self, directory: Path, sequences: int, milliseconds: float) -> None:
        from nanoactor.kv.manager import BlockManager
        from nanoactor.model_files.files import read_model_files
        from nanoactor.runner.config import RankConfig
        from nanoactor.runner.simulated import SimulatedExecutor
        from nanoactor.scheduling.config import SchedulerConfig
        from nanoactor.scheduling.scheduler import Scheduler
        from nanoactor.setup.actors import ActorConfig
        from nanoactor.text.decoding import DecoderFactory
        from nanoactor.text.detokenizer import Detokenizer
        from nanoactor.text.tokenizer import load_tokenizer

        options = options_of(sequences, milliseconds, Mode("", depth=1))
        config = EngineConfig(str(directory), **options)
        files = read_model_files(config)
        self.executor = SimulatedExecutor(RankConfig(ActorConfig(config, files, b"overlap")))
        blocks, size, length = self.executor.num_blocks, 16, files.max_model_len
        self.scheduler = Scheduler(
            SchedulerConfig(blocks, size, sequences, config.max_num_batched_tokens, length, depth=1)
        )
        self.manager = BlockManager(blocks, size, sequences, length, b"overlap")
        self.detokenizer = Detokenizer(DecoderFactory(load_tokenizer(directory)))
        self.delivered = [""] * sequences
        self.busy = self.idle = 0
        self.free_at = 0
        self.steps = self.tokens = 0

    def admit(self, number: int) -> None:
        from nanoactor.kv.hashing import block_hashes
        from nanoactor.messages.engine import Admit, RequestSpec, Stopping, TextOptions
        from nanoactor.models.sampling.columns import pack

        ids = np.array(prompt_of(number), np.int32)
        options = Stopping(30_000, 0, (), ()), TextOptions((), False, True, 0)
        spec = RequestSpec(0, pack({"seed": number}), *options)
        self.handle(Admit(number, spec, ids, len(ids), block_hashes(ids, 16, b"overlap")))

    def handle(self, event) -> None:
        """One event of the scheduler and all that follows from it at once, but for the device."""
        from nanoactor.messages.engine import Open, Turn
        from nanoactor.runner.batch.batch import NO_MASKS
        from nanoactor.runner.batch.pixels import NO_PIXELS

        events = [event]
        while events:
            for _, message in self.scheduler.handle(events.pop(0)):
                match message:
                    case Turn():
                        if (step := self.manager.apply_turn(message)) is not None:
                            self.pending = (
                                step.step,
                                self.executor.prepare(step, NO_PIXELS, NO_MASKS),
                            )
                    case Open():
                        self.detokenizer.open(message)
                    case _:
                        self.detokenizer.process(message)
                if (answer := self.manager.take_answer()) is not None:
                    events.append(answer)

    def deliver(self) -> None:
        """Hand text to each request, as an engine in one process does."""
        while (chunk := self.detokenizer.pop_delta(1 << 18)) is not None:
            for uid, text in zip(chunk.uids.tolist(), chunk.texts, strict=True):
                self.delivered[uid] = text

    def step(self) -> None:
        from nanoactor.messages.engine import StepDone

        number, pending = self.pending
        computed = pending.wait()
        if self.free_at:
            self.idle += computed.begin - self.free_at
        self.busy += computed.end - computed.begin
        self.free_at = computed.end
        self.steps += 1
        self.tokens += len(computed.token_ids)
        self.handle(StepDone(number, computed.counts, computed.token_ids, 0.0, 0))
        self.deliver()


def measure_loop(directory: Path, sequences: int, milliseconds: float, args) -> dict:
    loop = InProcessLoop(directory, sequences, milliseconds)
    for number in range(sequences):
        loop.admit(number)
    warm_until = time.monotonic() + 0.4
    while time.monotonic() < warm_until or loop.scheduler.figures()["running"] < sequences:
        loop.step()
    gc.collect()
    before = loop.busy, loop.idle, loop.steps, loop.tokens, time.process_time()
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        loop.step()
    after = loop.busy, loop.idle, loop.steps, loop.tokens, time.process_time()
    busy, idle, steps, tokens, cpu = (b - a for a, b in zip(before, after, strict=True))
    seconds = (busy + idle) * 1e-9
    return {
        "idle": idle / (busy + idle),
        "rows_per_step": tokens / steps,
        "steps_per_s": steps / seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_us_per_token": cpu / tokens * 1e6,
        "cpu_ms_per_step": cpu / steps * 1e3,
    }


# -- all of it ----------------------------------------------------------------------------


def median_of(rounds: list[dict]) -> dict:
    """Key by key; the median round's text where a figure is none."""
    result = {}
    for key, value in rounds[0].items():
        if isinstance(value, dict):
            result[key] = median_of([r[key] for r in rounds])
        elif isinstance(value, str):
            result[key] = statistics.mode(r[key] for r in rounds)
        else:
            result[key] = round(statistics.median(r[key] for r in rounds), 5)
    result_all = [round(r["idle"], 5) for r in rounds] if "idle" in rounds[0] else None
    return result | ({"idle_of_rounds": result_all} if result_all else {})


def measure(directory: Path, args) -> tuple[list[dict], object]:
    rows, kept = [], None
    for milliseconds in args.ms:
        for sequences in args.sequences:
            rounds: dict[str, list[dict]] = {mode.name: [] for mode in ENGINE_MODES}
            rounds["in-process loop"] = []
            for _ in range(args.rounds):
                for mode in ENGINE_MODES:
                    figures_, trace = uvloop.run(
                        measure_engine(directory, sequences, milliseconds, mode, args)
                    )
                    rounds[mode.name].append(figures_)
                    if (mode.name, sequences, milliseconds) == ("depth 2", 64, 5):
                        kept = trace
                rounds["in-process loop"].append(
                    measure_loop(directory, sequences, milliseconds, args)
                )
            for name, found in rounds.items():
                row = {"ms": milliseconds, "sequences": sequences, "mode": name}
                rows.append(row | median_of(found))
                show(rows[-1])
    return rows, kept


def show(row: dict) -> None:
    print(
        f"{row['ms']:4g} ms {row['sequences']:5d} seq  {row['mode']:16s} idle {row['idle']:7.2%}  "
        f"rows/step {row['rows_per_step']:7.1f}  {row['tokens_per_s']:9.0f} tok/s  "
        f"{row['cpu_us_per_token']:7.1f} us CPU/token {row['cpu_ms_per_step']:6.2f} ms CPU/step"
        + (f"  TTFT {row['ttft_ms']:6.1f} ms" if "ttft_ms" in row else ""),
        flush=True,
    )


def measure_hog(directory: Path, args) -> dict:
    """256 sequences, 5 ms: with and without a consumer that blocks the user's loop."""
    found: dict[str, list[float]] = {"free": [], "hogged": []}
    for _ in range(args.rounds):
        for name, hog in (("free", 0.0), ("hogged", 50.0)):
            figures_, _ = uvloop.run(measure_engine(directory, 256, 5, Mode("depth 2"), args, hog))
            found[name].append(round(figures_["idle"], 5))
    print("device idle with a free and with a hogged user's loop:", found, flush=True)
    return found


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = sorted({row["ms"] for row in rows})
    figure, axes = pyplot.subplots(1, len(steps), figsize=(4.6 * len(steps), 4), sharey=True)
    for axis, milliseconds in zip(np.atleast_1d(axes), steps, strict=True):
        for mode in ("in-process loop", "depth 1", "depth 2, late", "depth 2"):
            mine = [r for r in rows if r["ms"] == milliseconds and r["mode"] == mode]
            style = {"in-process loop": "--", "depth 2, late": ":"}.get(mode, "-")
            x, y = [r["sequences"] for r in mine], [100 * r["idle"] for r in mine]
            axis.plot(x, y, style, marker="o", label=mode)
        axis.set_xscale("log", base=2)
        axis.set_title(f"steps of {milliseconds:g} ms")
        axis.set_xlabel("sequences")
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("device idle, % of the time")
    np.atleast_1d(axes)[0].legend()
    figure.suptitle("What the engine's own work costs a simulated device")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--ms", type=float, nargs="+", default=[1, 5, 10])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = model_directory(Path(temporary))
        rows, trace = measure(directory, args)
        hog = measure_hog(directory, args) if 256 in args.sequences else None
    result = {
        "question": "how long does a simulated device idle because of the engine's own work?",
        "command": "python bench/overlap.py "
        f"--sequences {' '.join(map(str, args.sequences))} "
        f"--ms {' '.join(f'{ms:g}' for ms in args.ms)} "
        f"--seconds {args.seconds:g} --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            "uvloop": uvloop.__version__,
            "numpy": np.__version__,
        },
        "cores": len(os.sched_getaffinity(0)),
        "ns_per_span": round(nanoseconds_per_span(), 1),
        "rows": rows,
        "idle_with_hogged_user_loop": hog,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    if args.trace and trace is not None:
        trace.save(args.trace)
    print(f"a span costs {result['ns_per_span']} ns")


if __name__ == "__main__":
    main()
