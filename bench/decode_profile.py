"""Times each kernel of a decode step that runs by operators, and the step with and without Triton
launches that overlap.

    python bench/decode_profile.py --model 30b-a3b-fp8 --layers 8 --rows 8 64 256 --out results.json

A kernel's own time (`us`) includes its wait for the previous kernel where launches overlap. `share`
is the time from the previous kernel's end to its own, so that the shares of all kernels add up to
the time of the replays.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.decode_step import Worker, captured, clocked
from bench.decode_step_cases import SIZES, Case, shape_of
from bench.gpu import arguments
from nanoactor.models.devices.cuda.kernels import dependent_launch

_REPLAYS = 5


def kernels_of(graph: torch.cuda.CUDAGraph, layers: int) -> dict[str, dict[str, float]]:
    """Return, for each kernel, its time and its share of the step in us, and its number of
    launches, per layer."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    events = [
        event
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    time, share, count = (collections.Counter[str]() for _ in range(3))
    last_end = None
    for event in sorted(events, key=lambda event: event.time_range.end):
        name, end = event.name[:80], event.time_range.end
        time[name] += event.time_range.elapsed_us()
        count[name] += 1
        share[name] += event.time_range.elapsed_us() if last_end is None else end - last_end
        last_end = end
    each = _REPLAYS * layers
    return {
        name: {
            "us": round(us / each, 2),
            "share": round(share[name] / each, 2),
            "launches": round(count[name] / each, 2),
        }
        for name, us in time.most_common(30)
    }


def measure(worker: Worker, model: str, layers: int, rows: int) -> dict[str, Any]:
    contexts = [1024 + row % 16 for row in range(rows)]
    case: Case = {"kind": "time", "model": model, "layers": layers, "contexts": contexts}
    shape = shape_of(case, worker.blocks)
    operators = worker.model(case, shape).operators
    inputs, caches = worker.inputs(case, shape, torch.Generator("cuda").manual_seed(rows))
    step = operators.step(shape, inputs, caches)
    overlapping = captured(step)
    options = dependent_launch.dependent_launch()
    apart = captured_apart(step)
    us: dict[str, list[float]] = {"overlapping": [], "apart": []}
    for _ in range(3):
        us["overlapping"].append(clocked(overlapping, 30) * 1e3)
        us["apart"].append(clocked(apart, 30) * 1e3)
    return {
        "model": model, "layers": layers, "rows": rows, "options": options, "us": us,
        "kernels": kernels_of(overlapping, layers),
    }  # fmt: skip


def captured_apart(step: Any) -> torch.cuda.CUDAGraph:
    """Capture the step as on GPUs of a lower compute capability."""
    lowest = dependent_launch._CAPABILITY
    dependent_launch._CAPABILITY = (99, 0)
    dependent_launch.options_of.cache_clear()
    try:
        return captured(step)
    finally:
        dependent_launch._CAPABILITY = lowest
        dependent_launch.options_of.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="30b-a3b-fp8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--out", help="a file for all results, as JSON")
    args = parser.parse_args()
    runs = []
    with torch.inference_mode():
        worker = Worker(5, torch.cuda.get_device_properties(0).multi_processor_count)
        for rows in args.rows:
            run = measure(worker, args.model, args.layers, rows)
            runs.append(run)
            print(args.model, f"rows {rows}:", json.dumps(run["us"]), flush=True)
            for name, kernel in run["kernels"].items():
                times = f"{kernel['us']:8.2f} us, share {kernel['share']:7.2f}"
                print(f"  {times} {kernel['launches']:5.2f} launches  {name}")
    if args.out:
        report = {
            "question": "where does the time of a decode step by operators go?",
            "command": "python bench/decode_profile.py " + " ".join(arguments()),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "runs": runs,
        }
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
