"""The time until an engine is ready, by phase of its log.

    python bench/startup.py [--model demo|0.6b|8b] [--device auto] [--rounds 3] [--out FILE]

Starts an engine with empty caches of compiled kernels, and then again and again with what the first
start has left in them. Phases are those that the runner's log tells: `weights`, `warm_up` (kernels
are compiled, memory is measured), `whole_steps` (NVRTC's), `captures`. `processes` is what comes
before: Python, its imports, the driver. 0.6b and 8b have Qwen3's true configurations and random
weights, which are made rather than read.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

import nanoactor
from bench.gpu import MODELS, arguments
from nanoactor import AsyncLLM

CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")
PHASES = {
    "weights": re.compile(r"loaded .* in ([\d.]+) s"),
    "warm_up": re.compile(r"warm-up took ([\d.]+) s"),
    "whole_steps": re.compile(r"compiled fused decode steps in ([\d.]+) s"),
    "captures": re.compile(r"captured \d+ of \d+ steps in ([\d.]+) s"),
}


class Phases(logging.Handler):
    """Takes the seconds of each phase from the log."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = time.monotonic()
        self.found: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a line."""
        for name, pattern in PHASES.items():
            if found := pattern.match(record.getMessage()):
                seconds = float(found.group(1))
                self.found[name] = seconds
                if name == "weights":
                    self.found["processes"] = time.monotonic() - self.begin - seconds


async def start(model: str, **options: Any) -> dict[str, float]:
    """Seconds of each phase, and until the engine was ready."""
    phases, log = Phases(), logging.getLogger("nanoactor")
    log.addHandler(phases)
    try:
        async with AsyncLLM(model, max_restarts=0, **options):
            ready = time.monotonic() - phases.begin
    finally:
        log.removeHandler(phases)
    rest = ready - sum(phases.found.values())
    return {**phases.found, "rest": rest, "ready": ready}


def measure(args: argparse.Namespace, directory: Path) -> dict[str, dict[str, float]]:
    """The first start, and the medians of the others."""
    model, options = args.model, {"device": args.device}
    if model != "demo":
        (directory / "config.json").write_text(json.dumps(MODELS[model]))
        model = str(directory)
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    starts = [uvloop.run(start(model, **options)) for _ in range(1 + args.rounds)]
    names = sorted({name for one in starts for name in one})
    warm = {name: statistics.median(one.get(name, 0.0) for one in starts[1:]) for name in names}
    return {"empty caches": starts[0], "warm caches": warm}


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", choices=("demo", *MODELS), default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("nanoactor").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        for number, cache in enumerate(CACHES):
            os.environ[cache] = str(Path(name) / f"cache-{number}")
        found = measure(args, Path(name))
    for kind, phases in found.items():
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        print(f"{args.model}, {kind}: {told} s")
    report = {
        "question": "how long does an engine take to be ready, and with what?",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "bench/startup.py", *arguments()]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {"nanoactor": nanoactor.__version__, "python": platform.python_version()},
        "seconds": found,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
