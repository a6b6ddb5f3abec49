"""The way of a first token through an idle engine, span by span, from the actors' own traces.

    python bench/first_token.py --model 0.6b|8b [--device cuda] [--prompt 512] [--rounds 40]
                                [--awake-ms 0 3] [--out FILE] [--image FILE.svg]
    python bench/first_token.py --read FILE --image FILE.svg

Requests of new random token ids follow each other with a pause between them, one token each. Every
span between the call of `generate` and its output is kept with its time since the call; the table
has the medians over the requests. With several `--awake-ms` the engines alternate, each
running half of its rounds at a time, on the same checkpoint; the image has one panel for each.

"left" is when a message was sent to the actor, "begins" when it was handled, so that the time
between the two is a wake-up; times in ms. CPU seconds are those of all processes of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS, params_of, prompts_of, report
from nanoactor import AsyncLLM
from nanoactor.runtime.tracing import NodeTrace

PAUSE = 0.05
LOAD = " load"
"""Tracks that tell when requests live: their `sent` are the numbers of steps."""
Steps = dict[tuple[str, str, int], tuple[float, float, float]]
"""By track, name, and how often it was there before: left, begins, ends; ms since the call."""


async def first_token(llm: AsyncLLM, prompt: list[int]) -> tuple[int, int]:
    """Return when it was asked for and when it was there, in ns of the monotonic clock."""
    begin = time.monotonic_ns()
    async for _ in llm.generate({"prompt_token_ids": prompt}, params_of(1, 0.0, 0)):
        pass
    return begin, time.monotonic_ns()


def steps_within(nodes: tuple[NodeTrace, ...], begin: int, end: int) -> Steps:
    """Return what began between two moments, by its place in the order of its kind."""
    found: Steps = {}
    for node in nodes:
        for track in node.tracks:
            if track.track.endswith(LOAD):
                continue
            seen: dict[str, int] = defaultdict(int)
            for kind, _, sent, began, ended in track.spans.tolist():
                if begin <= began <= end:
                    name = track.kinds[kind].name
                    times = (sent or began, began, ended)
                    left, begins, ends = ((at - begin) * 1e-6 for at in times)
                    found[track.track, name, seen[name]] = (left, begins, ends)
                    seen[name] += 1
    return found


async def measure(llm: AsyncLLM, length: int, rounds: int, seed: int) -> dict:
    """Milliseconds to the first token of each request, and the spans of each."""
    times, timelines = [], []
    for number, prompt in enumerate(prompts_of([length] * (rounds + 3), seed)):
        await asyncio.sleep(PAUSE)
        begin, end = await first_token(llm, prompt)
        trace = await llm.trace(begin)
        if number >= 3:
            times.append((end - begin) * 1e-6)
            timelines.append(steps_within(trace.nodes, begin, end))
    return {"ttft_ms": times, "timelines": timelines}


async def cpu_seconds(llm: AsyncLLM) -> float:
    """Sum what all processes of the engine, this one too, have computed."""
    nodes = {f["node"]["name"]: f["node"]["cpu_seconds"] for f in (await llm.statistics()).values()}
    return sum(nodes.values())


async def stream_cost(llm: AsyncLLM, rows: int, tokens: int, seed: int) -> dict:
    """Return what so many streams cost the processors, and how long they took."""
    prompts = prompts_of([64] * rows, seed)
    before, begin = await cpu_seconds(llm), time.perf_counter()

    async def one(prompt: list[int]) -> None:
        async for _ in llm.generate({"prompt_token_ids": prompt}, params_of(tokens, 0.0, 0)):
            pass

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - begin
    return {"cpu_seconds": await cpu_seconds(llm) - before, "seconds": seconds}


async def idle_cost(llm: AsyncLLM, seconds: float) -> float:
    """CPU seconds of an engine that nobody uses, per second."""
    await asyncio.sleep(0.5)
    before = await cpu_seconds(llm)
    await asyncio.sleep(seconds)
    return (await cpu_seconds(llm) - before) / seconds


async def run(args: argparse.Namespace, directory: str, seed: int, **options: object) -> dict:
    """One engine from start to end."""
    engine = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 4096}
    options["max_restarts"] = 0
    async with AsyncLLM(directory, device=args.device, **engine, **options) as llm:
        found = await measure(llm, args.prompt, max(2, args.rounds // 2), seed)
        found["idle_cpu_share"] = await idle_cost(llm, 2.0)
        found["streams"] = {
            str(rows): await stream_cost(llm, rows, args.tokens, seed + rows)
            for rows in args.streams
        }
    return found


def medians(timelines: list[Steps]) -> list[dict]:
    """Return what is in most of the timelines, in the order in which it begins."""
    by_step = defaultdict(list)
    for timeline in timelines:
        for step, times in timeline.items():
            by_step[step].append(times)
    rows = []
    for (track, name, _), all_times in by_step.items():
        if len(all_times) > len(timelines) / 2:
            left, begins, ends = (statistics.median(t) for t in zip(*all_times, strict=True))
            row = {"track": track, "span": name, "left": left, "begins": begins, "ends": ends}
            rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return sorted(rows, key=lambda row: (row["begins"], row["ends"]))


def table(rows: list[dict]) -> str:
    """For people."""
    lines = [f"{'track':18} {'span':14} {'left':>8} {'begins':>8} {'ends':>8} {'woke in':>8}"]
    for row in rows:
        times = (row["left"], row["begins"], row["ends"], row["begins"] - row["left"])
        lines.append(f"{row['track']:18} {row['span']:14} " + " ".join(f"{t:8.3f}" for t in times))
    return "\n".join(lines)


def draw(panels: dict[str, dict], path: str) -> None:
    """One row for each track, one panel for each engine, on one scale."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "first token"  # the same file each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(9, 2.6 * len(panels))
    )
    for axis, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        rows = [row for row in panel["timeline"] if not row["track"].endswith(LOAD)]
        tracks = list(dict.fromkeys(row["track"] for row in rows))[::-1]
        for row in rows:
            y = tracks.index(row["track"])
            axis.plot((row["left"], row["begins"]), (y, y), color="0.75", linewidth=1)
            axis.barh(y, max(0.01, row["ends"] - row["begins"]), left=row["begins"], height=0.6)
        axis.set_yticks(range(len(tracks)), tracks, fontsize=7)
        axis.set_title(f"{title}: first token in {panel['ttft_ms_median']:.2f} ms", fontsize=9)
        axis.axvline(panel["ttft_ms_median"], color="0.2", linewidth=0.8, linestyle=":")
    axes[-1, 0].set_xlim(left=0)
    axes[-1, 0].set_xlabel("ms since generate() was called")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def panel(runs: list[dict]) -> dict:
    """One engine's runs, their timelines summed up."""
    timelines = [timeline for run in runs for timeline in run.pop("timelines")]
    times = sorted(ms for run in runs for ms in run["ttft_ms"])
    return {
        "ttft_ms_median": statistics.median(times),
        "ttft_ms_p90": times[int(0.9 * len(times))],
        "timeline": medians(timelines),
        "runs": runs,
    }


def tell(title: str, panel: dict) -> None:
    """Print what was found of one engine."""
    median, most = panel["ttft_ms_median"], panel["ttft_ms_p90"]
    print(f"\n{title}: {median:.3f} ms, nine of ten within {most:.3f} ms")
    print(table(panel["timeline"]))
    for one in panel["runs"]:
        print({k: v for k, v in one.items() if k != "ttft_ms"})


def run_in_turns(args: argparse.Namespace) -> dict[str, dict]:
    """Run the engines alternately; returns a panel for each."""
    choices = {f"awake {ms:g} ms": {"awake_ms": ms} for ms in args.awake_ms or []}
    choices = choices or {args.model: {}}
    found: dict[str, list[dict]] = {title: [] for title in choices}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[args.model]))
        for turn in range(args.turns):
            for title, options in choices.items():
                found[title].append(uvloop.run(run(args, directory, 7919 * turn, **options)))
                print(title, f"{statistics.median(found[title][-1]['ttft_ms']):.3f} ms", flush=True)
    return {title: panel(runs) for title, runs in found.items()}


def save(model: str, panels: dict[str, dict], path: str) -> None:
    """Write a results file."""
    packages = ("torch", "triton", "numpy", "uvloop")
    told = report(model, [panels], packages, "nanoactor " + nanoactor.__version__)
    told["question"] = "where does the time to the first token go?"
    Path(path).write_text(json.dumps(told, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """Those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=40, help="half of them in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--awake-ms", type=float, nargs="*")
    parser.add_argument("--out", help="where to write the results")
    parser.add_argument("--read", help="results to draw instead of measuring")
    parser.add_argument("--image", help="an SVG file")
    return parser.parse_args()


def main() -> None:
    """Measure or read, then print, write and draw."""
    args = arguments()
    if args.read:
        panels = json.loads(Path(args.read).read_text())["runs"][0]
    else:
        panels = run_in_turns(args)
        for title, found in panels.items():
            tell(title, found)
    if args.out:
        save(args.model, panels, args.out)
    if args.image:
        draw(panels, args.image)


if __name__ == "__main__":
    main()
