"""Checks the kernel of a whole decode step against the engine's own operators, and times both.

    python bench/decode_step.py --out results.json
    python bench/decode_step.py --model 8b --only time

With more rows than a kernel takes, the operators alone are timed. Where layers have experts, the
number of those that the rows have chosen is printed, its mean over the layers.
Cases run in order in a worker process. One that hangs or fails says in which phase, and the rest go
on in a new worker. A hang ends by itself after `--patience` seconds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.decode_step_cases import SIZES, Case, cases_of, name_of, shape_of, shapes_of
from bench.decode_step_operators import DEVICE, GROUP, Operators
from bench.decode_step_reference import (
    EPS,
    Expected,
    expected_of,
    random_caches,
    random_inputs,
    random_weights,
)
from bench.decode_step_walk import Walk
from bench.gpu import arguments
from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import StepInputs
from nanoactor.models.devices.cuda.kernels.decode_step.compile import load_or_compile
from nanoactor.models.devices.cuda.kernels.decode_step.steps import DecodeStep
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    Phase,
    Shape,
    shape_unsupported_reason,
)
from nanoactor.models.weights.whole_step import ModelWeights

# -- a worker -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """The tensors and operators that cases of one model share."""

    weights: ModelWeights
    operators: Operators
    step: DecodeStep | None = None
    """The first that was made."""


SETTLED = 0.05
"""A gap between scores of experts that rounding does not close."""


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative; NaN where anything is not a number, 0 where nothing is compared."""
    if not len(wanted):
        return 0.0
    wide = wanted.double()
    return float((got.double() - wide).norm() / wide.norm())


class Worker:
    """Runs cases."""

    def __init__(self, patience: float, blocks: int) -> None:
        self.patience = patience
        self.models: dict[str, Model] = {}
        self.step: DecodeStep | None = None
        self.blocks = blocks

    def model(self, case: Case, shape: Shape) -> Model:
        key = f"{case['model']}/{shape.layers}"
        if key not in self.models:
            self.models.clear()
            torch.cuda.empty_cache()
            generator = torch.Generator(DEVICE).manual_seed(1)
            weights = random_weights(shape, generator, GROUP)
            operators = Operators(shape, weights)
            cos, sin = operators.tables()
            weights = dataclasses.replace(weights, cos=cos, sin=sin)
            self.models[key] = Model(weights, operators)
        return self.models[key]

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        shape = shape_of(case, self.blocks)
        why = shape_unsupported_reason(shape)
        if why and case["kind"] != "time":
            return {"refused": why}
        model = self.model(case, shape)
        if why:
            generator = torch.Generator(DEVICE).manual_seed(seed)
            return self.time_operators(case, shape, model, generator)
        self.step = DecodeStep(shape, model.weights, EPS, self.patience, model.step)
        model.step = model.step or self.step
        generator = torch.Generator(DEVICE).manual_seed(seed)
        methods = {"check": self.check, "time": self.time, "repeat": self.repeat, "walk": self.walk}
        return methods[case["kind"]](case, shape, model, generator)

    def inputs(
        self, case: Case, shape: Shape, generator: torch.Generator
    ) -> tuple[StepInputs, list[KVCache]]:
        inputs, pages, used = random_inputs(shape, case["contexts"], generator)
        return inputs, random_caches(shape, pages, used, generator)

    def errors(
        self, shape: Shape, wanted: Expected, step: Any, inputs: StepInputs, caches: list[KVCache]
    ) -> dict[str, float]:
        """Compare with the reference: hidden states, logits, the new tokens' keys and values; of
        rows in which rounding changes no choice of experts."""
        written, rows = [], wanted.gaps > SETTLED
        places = inputs.slot_mapping[rows]
        for index, cache in enumerate(caches):
            for held, right in (
                (cache.keys, wanted.keys[index]),
                (cache.values, wanted.values[index]),
            ):
                written.append(difference(held.flatten(0, 1)[places], right[rows]))
        return {
            "hidden": difference(step.hidden[rows], wanted.hidden[rows]),
            "logits": difference(step.logits[rows], wanted.logits[rows]),
            "written": max(written),
            "argmax": int((step.logits.argmax(-1) == wanted.logits.argmax(-1)).sum()),
            "rows": int(rows.sum()),
        }

    def compare(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> Any:
        """Run both on the same inputs: (errors of both, inputs, caches)."""
        step = self.step
        assert step is not None
        inputs, caches = self.inputs(case, shape, g)
        kind = torch.float64 if shape.layers <= 4 else torch.float32
        wanted = expected_of(shape, model.weights, caches, inputs, kind, rounds=False)
        before = [KVCache(cache.keys.clone(), cache.values.clone()) for cache in caches]
        held = dataclasses.make_dataclass("Held", ["hidden", "logits"])
        step.scratch.hidden.fill_(torch.nan)
        step.scratch.logits.fill_(torch.nan)
        step(inputs, caches)
        synchronize()
        found = {
            "kernel": self.errors(
                shape, wanted, held(step.scratch.hidden, step.logits), inputs, caches
            ),
            "touched": self.touched(inputs, caches, before),
            "experts": mean(wanted.experts) if wanted.experts else 0,
        }
        if not case.get("alone"):  # the operators are compiled for each model
            model.operators.step(shape, inputs, before)()
            found["operators"] = self.errors(shape, wanted, model.operators, inputs, before)
        return found, inputs, caches

    @staticmethod
    def touched(inputs: StepInputs, caches: list[KVCache], others: list[KVCache]) -> int:
        """Count values that the step has changed, apart from the new tokens'."""
        count = 0
        for cache, other in zip(caches, others, strict=True):
            for a, b in ((cache.keys, other.keys), (cache.values, other.values)):
                differs = a.flatten(0, 1).view(torch.int16) != b.flatten(0, 1).view(torch.int16)
                differs[inputs.slot_mapping] = False
                count += int(differs.sum())
        return count

    def check(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> dict[str, Any]:
        found, _, _ = self.compare(case, shape, model, g)
        ours, theirs = found["kernel"], found.get("operators")
        found["good"] = found["touched"] == 0 and all(
            ours[name] <= (margin(shape, ours["rows"]) * theirs[name] if theirs else 1e-2)
            for name in ("hidden", "logits", "written")
        )
        return found

    def time(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> dict[str, Any]:
        found, inputs, caches = self.compare(case, shape, model, g)
        step = self.step
        assert step is not None
        first = step.scratch.hidden.clone(), step.logits.clone()
        graph = captured(lambda: step(inputs, caches))
        found["ms"] = clocked(graph, 100)
        again = step.scratch.hidden, step.logits
        found["same"] = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        factor = margin(shape, found["kernel"]["rows"])
        allowed = found["operators"]["hidden"] * (factor if factor > 1.05 else 1)
        found["good"] = found["same"] and found["kernel"]["hidden"] <= allowed
        if not case.get("options"):
            run = model.operators.step(shape, inputs, caches)
            found["operators_ms"] = clocked(captured(run), 30)
        else:
            found["trace"] = phases_of(step.scratch.trace, shape.phases) if shape.trace else None
        return found | floor_of(shape, case["contexts"], found["experts"], found["ms"])

    def time_operators(
        self, case: Case, shape: Shape, model: Model, g: torch.Generator
    ) -> dict[str, Any]:
        """A step that no kernel does."""
        inputs, caches = self.inputs(case, shape, g)
        wanted = expected_of(shape, model.weights, caches, inputs, torch.float32, rounds=False)
        run = model.operators.step(shape, inputs, caches)
        ms = clocked(captured(run), 30)
        held = model.operators
        found = {
            "operators": self.errors(shape, wanted, held, inputs, caches),
            "experts": mean(wanted.experts) if wanted.experts else 0,
            "operators_ms": ms,
            "good": bool(torch.isfinite(held.hidden.float()).all()),
        }
        return found | floor_of(shape, case["contexts"], found["experts"], ms)

    def repeat(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> dict[str, Any]:
        """200 times other inputs: twice the same bits, and close to the operators."""
        step, draw = self.step, random.Random(1)
        assert step is not None
        unlike, worst, begin = 0, 0.0, time.monotonic()
        pages = shape.rows * 26 + 3
        caches = random_caches(shape, pages, torch.arange(pages, device=DEVICE), g)
        count = 0
        while count < 200 and time.monotonic() - begin < 12:
            contexts = [draw.choice((draw.randint(1, 1600), 1600)) for _ in range(shape.rows)]
            inputs, _, _ = random_inputs(shape, contexts, g)
            model.operators.step(shape, inputs, caches)()
            results = []
            for _ in range(2):
                step.scratch.hidden.fill_(torch.nan)
                step.scratch.logits.fill_(torch.nan)
                step(inputs, caches)
                results.append((step.scratch.hidden.clone(), step.logits.clone()))
            unlike += not all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            apart = difference(results[0][1], model.operators.logits)
            worst = apart if apart != apart else max(worst, apart)
            count += 1
        # Both choose experts by themselves.
        good = unlike == 0 and (shape.mixture is not None or worst < (0.3 if shape.packed else 0.1))
        return {"good": good, "unlike": unlike, "worst": worst, "count": count}

    def walk(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> dict[str, Any]:
        """Thousands of steps of a batch that changes: all logits are compared with the operators',
        and those of one step in 97 with float64."""
        sizes = (1, 2, 4, 8, 16)
        shapes = {rows: dataclasses.replace(shape, rows=rows) for rows in sizes}
        steps = {
            rows: DecodeStep(of, model.weights, EPS, self.patience, model.step)
            for rows, of in shapes.items()
        }
        walk = Walk(shape, g, seed=1)
        worst, ours, theirs, count, begin = 0.0, 0.0, 0.0, 0, time.monotonic()
        while count < case["steps"] and time.monotonic() - begin < 45:
            slots, inputs = walk.step()
            rows = len(slots)
            size = next(size for size in sizes if size >= rows)
            self.step, count = steps[size], count + 1
            exact = None
            if count % 97 == 0:
                one = dataclasses.replace(shape, rows=rows)
                exact = [
                    expected_of(one, model.weights, caches, inputs, torch.float64).logits
                    for caches in (walk.ours, walk.theirs)
                ]
            self.step.scratch.logits.fill_(torch.nan)
            self.step(walk.padded(slots, inputs, size), walk.ours)
            model.operators.step(dataclasses.replace(shape, rows=rows), inputs, walk.theirs)()
            got, other = self.step.logits[:rows], model.operators.logits
            apart = difference(got, other)
            worst = apart if apart != apart else max(worst, apart)
            if exact is not None:
                ours += difference(got, exact[0])
                theirs += difference(other, exact[1])
        near = worst < (0.3 if shape.packed else 0.1)
        return {
            "good": near and 0 < ours < margin(shape, 16) * theirs,
            "count": count, "worst": worst, "unlike": 0, "error": ours / theirs,
            "joined": walk.joined, "left": walk.left, "page ends": walk.page_ends,
            "longest": walk.longest,
        }  # fmt: skip


def margin(shape: Shape, rows: int) -> float:
    """Return how much larger our errors may be than the operators'. Both round activations to e4m3
    where matrices are packed, not all of them alike; and what experts give by other steps. In few
    rows such errors differ by chance."""
    if shape.packed and shape.mixture is not None and rows < 4:
        return 1.5
    return 1.25 if shape.packed or shape.mixture is not None else 1.05


def bytes_of(shape: Shape, contexts: list[int], experts: float) -> float:
    """Bytes that a step must read: weights and cache, once; of so many experts in each layer."""
    inner = 3 * shape.inter * (experts if shape.mixture is not None else 1)
    layer = shape.hidden * (shape.qkv + shape.width + inner)
    weights = (1 if shape.packed else 2) * shape.layers * layer + 2 * shape.vocab * shape.hidden
    return weights + 4 * shape.layers * sum(contexts) * shape.kv_heads * shape.head_dim


def floor_of(shape: Shape, contexts: list[int], experts: float, ms: float) -> dict[str, float]:
    """Compare a time with that of the bytes alone."""
    moved = bytes_of(shape, contexts, experts)
    floor = moved / (4.28e12 if "H200" in torch.cuda.get_device_name() else 3.0e12) * 1e3
    return {"GB/s": moved / ms / 1e6, "floor": floor, "of_floor": floor / ms}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def captured(run: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.synchronize()
    return graph


def clocked(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of a replay: the median of five trials."""
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / replays)
    return sorted(found)[2]


def phases_of(trace: torch.Tensor, phases: Sequence[Phase]) -> dict[str, int]:
    """Cycles of block 0 from mark to mark: medians over layers."""
    marks = trace.cpu()
    layers = len(marks) - 1
    names = [f"{phase.name.lower()} {end}" for phase in phases for end in ("inputs", "end")]
    last = marks[: layers - 1, 2 * len(phases) - 1]
    ends = {name: int((marks[1:layers, i] - last).float().median()) for i, name in enumerate(names)}
    found, before = {}, 0
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > 0:
            found[name], before = end - before, end
    found["layer"] = int((marks[2:layers, 1] - marks[1 : layers - 1, 1]).float().median())
    head = marks[layers]
    at = 2 * len(phases)
    found["final inputs"] = int(head[at] - marks[layers - 1, at - 1])
    found["head"] = int(head[at + 1] - head[at])
    return found


def work(args: argparse.Namespace) -> None:
    """Run cases from `args.worker` on; a line of JSON each."""
    cases = cases_of(args)
    with torch.inference_mode():
        worker = Worker(args.patience, torch.cuda.get_device_properties(0).multi_processor_count)
        for number in range(args.worker, len(cases)):
            print(f"@begin {number}", flush=True)
            try:
                found = worker.run(cases[number], number + 1)
            except Exception as error:
                found = failure(worker, error)
                print(f"@end {json.dumps(found)}", flush=True)
                os._exit(3)  # the context may be gone
            print(f"@end {json.dumps(found)}", flush=True)


def failure(worker: Worker, error: Exception) -> dict[str, Any]:
    try:
        if worker.step is not None:
            worker.step.raise_if_stopped()
        where = ""
    except RuntimeError as stopped:
        where = str(stopped)
    return {"good": False, "stopped": where, "error": f"{type(error).__name__}: {str(error)[:600]}"}


# -- the parent -----------------------------------------------------------------------------------


def compile_one(shape: Shape) -> str:
    """Compile for the disk's cache; returns what went wrong."""
    try:
        load_or_compile(shape)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def prepare(cases: list[Case], blocks: int) -> None:
    """Compile all kernels side by side (NVRTC has one lock in a process)."""
    wanted = dict.fromkeys(shape for case in cases for shape in shapes_of(case, blocks))
    shapes = [shape for shape in wanted if shape_unsupported_reason(shape) is None]
    begin = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    most = max(1, min(12, (os.cpu_count() or 1) - 2, len(shapes)))
    with concurrent.futures.ProcessPoolExecutor(most, mp_context=spawn) as pool:
        errors = [error for error in pool.map(compile_one, shapes) if error]
    seconds = time.monotonic() - begin
    print(f"{len(shapes)} kernels compiled in {seconds:.1f} s, {len(errors)} failed", flush=True)
    for error in errors[:1]:
        print(error[:3000], flush=True)


def times_of(found: dict[str, Any]) -> list[str]:
    parts = []
    if "ms" in found:
        parts.append(f"{found['ms']:.3f} ms")
    if "operators_ms" in found:
        parts.append(f"operators {found['operators_ms']:.3f} ms")
    if "of_floor" in found:
        parts.append(f"{found['GB/s']:.0f} GB/s {found['of_floor']:.0%} of floor")
    if found.get("experts"):
        parts.append(f"{found['experts']:.1f} experts a layer")
    return parts


def summary(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    verdict = "ok  " if found.get("good") else "BAD "
    if "stopped" in found:
        return f"{verdict}{found['stopped'] or '(no phase)'} | {found['error']}"
    parts = times_of(found)
    if "kernel" in found:
        theirs = found.get("operators") or {}
        pairs = [(n, a, theirs.get(n)) for n, a in found["kernel"].items()]
        parts.append(
            ", ".join(f"{n} {a:.3g}" + (f"/{b:.3g}" if b is not None else "") for n, a, b in pairs)
        )
        parts.append(f"touched {found['touched']}")
    if "same" in found and not found["same"]:
        parts.append("CHANGED while it was timed")
    if "unlike" in found:
        parts.append(
            f"{found['count']} times, {found['unlike']} unlike, worst {found['worst']:.2e}"
        )
    if "joined" in found:
        told = ("joined", "left", "page ends", "longest")
        parts.append(f"error {found['error']:.2f} of the operators'")
        parts.append(", ".join(f"{name} {found[name]}" for name in told))
    if found.get("trace"):
        parts.append("\n       " + ", ".join(f"{k} {v}" for k, v in found["trace"].items()))
    return verdict + "; ".join(parts)


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a results file."""
    return {
        "question": "is a whole decode step in one kernel right, and how fast is it?",
        "command": "python bench/decode_step.py " + " ".join(arguments()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "runs": results,
    }


class Parent:
    """Starts workers and prints what they find."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cases = args, cases_of(args)
        self.results: list[dict[str, Any]] = []
        self.begin = time.monotonic()

    def run(self) -> None:
        number = 0
        while number < len(self.cases) and self.left() > 0:
            number = self.watch(number)
        for case in self.cases[len(self.results) :]:
            print(f"{name_of(case)}: not run, time is up", flush=True)
        if self.args.out:
            Path(self.args.out).write_text(json.dumps(report(self.results), indent=1) + "\n")
        bad = [r for r in self.results if not r.get("good") and "refused" not in r]
        print(f"{len(self.results)} of {len(self.cases)} cases, {len(bad)} bad, "
              f"{time.monotonic() - self.begin:.0f} s", flush=True)  # fmt: skip

    def left(self) -> float:
        return float(self.args.limit - (time.monotonic() - self.begin))

    def watch(self, first: int) -> int:
        """Start a worker from a case on; returns the case to go on with."""
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(first)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        number, done = first, first
        assert worker.stdout is not None
        timer = threading.Timer(min(self.left(), 60), worker.kill)
        timer.start()
        for line in worker.stdout:
            if line.startswith("@begin"):
                number = int(line.split()[1])
                timer.cancel()
                timer = threading.Timer(max(1, min(self.left(), 60)), worker.kill)
                timer.start()
            elif line.startswith("@end"):
                self.note(number, json.loads(line[5:]))
                done = number + 1
            else:
                print(line, end="", flush=True)
        timer.cancel()
        code = worker.wait()
        if done == number and done < len(self.cases) and done == len(self.results):
            self.note(number, {"good": False, "stopped": "", "error": f"worker ended with {code}"})
            done += 1
        return done

    def note(self, number: int, found: dict[str, Any]) -> None:
        case = self.cases[number]
        self.results.append(case | found)
        print(f"{name_of(case)}: {summary(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ("check", "time", "others", "repeat", "walk", "variants", "sanitized", "contexts")
    parser.add_argument("--model", choices=SIZES, default="0.6b")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds[:-2])
    parser.add_argument("--out", help="a file for all results, as JSON")
    parser.add_argument("--limit", type=float, default=140, help="seconds for all")
    parser.add_argument("--patience", type=float, default=2, help="seconds until a hang ends")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}", flush=True)
    parent = Parent(args)
    prepare(parent.cases, properties.multi_processor_count)
    parent.run()


if __name__ == "__main__":
    main()
