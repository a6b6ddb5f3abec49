"""Measure the CPU device where the processor is shared: default threads, one thread and all.

    python bench/shared_cpu.py [--neighbours 0 2 4] [--throttle 0.5] [--rounds 2] [--dtype bfloat16]
                               [--before CHECKOUT] [--out FILE]

The demo model, greedy, one stream of 250 tokens and 32 of 120: output tokens per second,
alternately for `threads` = None (the engine chooses by what steps take), 1, and all cores, as the
default was before. neighbours: so many processes that compute all the time. throttle: the runner's
process is stopped for this share of each 100 ms, as a quota does it. `lowest_ratio`: the default by
the better of the other two; `gain_over_all_cores`: by all cores; of medians, the lower of both
loads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nanoactor
from nanoactor import AsyncLLM, RequestOutputKind, SamplingParams

STREAMS = {1: 250, 32: 120}


async def rate(llm: AsyncLLM, streams: int, tokens: int) -> float:
    """Output tokens per second."""
    params = SamplingParams.for_model(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(number: int) -> None:
        async for _ in llm.generate({"prompt_token_ids": [3 + number] * 40}, params):
            pass

    begin = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(streams)))
    return streams * tokens / (time.perf_counter() - begin)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    program = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(program) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """A process that stands still for this share of each 100 ms."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while not ended.wait(0.1 * (1 - share)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.1 * share)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    if share:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if share:
            thread.join()


async def measure(dtype: str, threads: int | None, throttle: float) -> dict[int, float]:
    """Tokens per second by number of streams."""
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "max_num_seqs": 64}
    async with AsyncLLM("demo", threads=threads, **options) as llm:
        found = {}
        with throttled(llm.pids["runner.0"], throttle):
            for streams, tokens in STREAMS.items():
                await rate(llm, streams, 30)
                found[streams] = await rate(llm, streams, tokens)
        return found


def measure_before(checkout: str, dtype: str, throttle: float) -> dict[int, float]:
    """The same of another version, with its default."""
    command = [sys.executable, __file__, "--throttle", str(throttle), "--dtype", dtype, "--once"]
    environment = {**os.environ, "PYTHONPATH": checkout}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, check=True)
    return {int(streams): rate for streams, rate in json.loads(done.stdout).items()}


def case(args: argparse.Namespace, count: int, throttle: float) -> dict[str, Any]:
    """All three choices alternately, for so many rounds."""
    cores = len(os.sched_getaffinity(0))
    choices: dict[str, int | None] = {"default": None, "one": 1, "all": cores}
    rates: dict[str, dict[str, list[float]]] = {}
    with neighbours(count):
        for _ in range(args.rounds):
            for name, threads in choices.items():
                for streams, value in asyncio.run(measure(args.dtype, threads, throttle)).items():
                    rates.setdefault(str(streams), {}).setdefault(name, []).append(round(value, 1))
            if args.before:
                earlier = measure_before(args.before, args.dtype, throttle)
                for streams, value in earlier.items():
                    rates[str(streams)].setdefault("before", []).append(round(value, 1))
    medians = {
        streams: {name: statistics.median(values) for name, values in by.items()}
        for streams, by in rates.items()
    }
    lowest = min(by["default"] / max(by["one"], by["all"]) for by in medians.values())
    gain = min(by["default"] / by["all"] for by in medians.values())
    found = {"neighbours": count, "throttle": throttle, "tokens_per_s": rates}
    found |= {"lowest_ratio": round(lowest, 3), "gain_over_all_cores": round(gain, 3)}
    if args.before:
        gain = min(by["default"] / by["before"] for by in medians.values())
        found["gain_over_before"] = round(gain, 3)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--neighbours", type=int, nargs="*", default=[0, 2, 4])
    parser.add_argument("--throttle", type=float, nargs="*", default=[0.5])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", help="another version's checkout")
    parser.add_argument("--once", action="store_true", help="for the process that --before starts")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(asyncio.run(measure(args.dtype, None, args.throttle[0]))))
        return
    given = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    given = [Path(word).name if word == args.before else word for word in given]
    cases = [case(args, count, 0.0) for count in args.neighbours]
    cases += [case(args, 0, share) for share in args.throttle]
    versions = {name: importlib.metadata.version(name) for name in ("torch",)}
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "bench/shared_cpu.py", *given]),
        "versions": {"nanoactor": nanoactor.__version__, "python": platform.python_version()}
        | versions,
        "cores": len(os.sched_getaffinity(0)),
        "cases": cases,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
