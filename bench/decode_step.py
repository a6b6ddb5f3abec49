"""Checks and times the kernel of a whole decode step beside the engine's own operators, on one GPU.

    python bench/decode_step.py --out results.json
    python bench/decode_step.py --model 8b --only time

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.decode_step_reference import (
    EPS,
    Expected,
    expected_of,
    random_caches,
    random_inputs,
    random_weights,
)
from bench.decode_step_walk import LONGEST, Walk
from bench.gpu import arguments
from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.config import ModelConfig, RopeConfig
from nanoactor.models.decoder import Decoder
from nanoactor.models.kernels.decode_step.arguments import StepInputs
from nanoactor.models.kernels.decode_step.compile import compiled
from nanoactor.models.kernels.decode_step.steps import DecodeStep, maps_of
from nanoactor.models.kernels.decode_step.table import PHASES, Shape, refusal
from nanoactor.models.model_weights import ModelWeights
from nanoactor.models.seq_lens import NO_SEQ_LENS
from nanoactor.models.weights import Weights

Case = dict[str, Any]
DEVICE = "cuda"
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {"layers": 28, "hidden": 1024, "inter": 3072, "heads": 16, "kv_heads": 8},
    "1.7b": {"layers": 28, "hidden": 2048, "inter": 6144, "heads": 16, "kv_heads": 8},
    "4b": {"layers": 36, "hidden": 2560, "inter": 9728, "heads": 32, "kv_heads": 8},
    "8b": {"layers": 36, "hidden": 4096, "inter": 12288, "heads": 32, "kv_heads": 8},
    "qwen2.5-7b": {
        "layers": 28, "hidden": 3584, "inter": 18944, "heads": 28, "kv_heads": 4,
        "qk_norm": False, "qkv_bias": True,
    },
    "llama-1b": {
        "layers": 16, "hidden": 2048, "inter": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64,
        "qk_norm": False, "vocab": 128256,
    },
    "small": {
        "layers": 2, "hidden": 1024, "inter": 2048, "heads": 8, "kv_heads": 4, "vocab": 4096,
    },
}  # fmt: skip
MIX = [1, 1030, 17, 64, 700, 333, 2, 129, 65, 1500, 16, 900, 48, 255, 1024, 511]
"""Contexts of the rows of a ragged batch."""


def shape_of(case: Case, blocks: int = 132) -> Shape:
    sizes = {
        "head_dim": 128, "vocab": 151936, "qk_norm": True, "qkv_bias": False,
        **SIZES[case["model"]],
    }  # fmt: skip
    if case.get("layers"):
        sizes["layers"] = case["layers"]
    return Shape(
        **sizes,
        rows=len(case["contexts"]),
        block_size=case.get("block_size", 64),
        blocks=blocks,
        head=1,
        **case.get("options", {}),
    )


def shapes_of(case: Case, blocks: int) -> list[Shape]:
    """All that a case compiles."""
    shape = shape_of(case, blocks)
    sizes = (1, 2, 4, 8, 16) if case["kind"] == "walk" else (shape.rows,)
    return [dataclasses.replace(shape, rows=rows) for rows in sizes]


# -- cases ----------------------------------------------------------------------------------------


def same(rows: int) -> list[int]:
    return [1024 + 5 * row for row in range(rows)]


def checks(model: str) -> Iterator[Case]:
    yield {"kind": "check", "model": model, "layers": 2, "contexts": [777]}
    for rows in (8, 1, 2, 4, 16, 3):
        yield {"kind": "check", "model": model, "layers": 2, "contexts": MIX[:rows][::-1]}
    for rows in (1, 8, 16):
        options = {"delays": True, "poison": True}
        yield {
            "kind": "check", "model": model, "layers": 2, "contexts": same(rows),
            "options": options, "block_size": 16,
        }  # fmt: skip
    long = [9000, 3, 40, 7, 1, 300, 21, 5]
    yield {"kind": "check", "model": model, "layers": 2, "contexts": long, "block_size": 256}


def times(model: str) -> Iterator[Case]:
    for rows in (1, 8, 2, 4, 16):
        yield {"kind": "time", "model": model, "contexts": same(rows)}


def others() -> Iterator[Case]:
    for model in ("8b", "1.7b", "4b", "qwen2.5-7b", "llama-1b"):
        for rows in (1, 8, 16):
            yield {
                "kind": "check", "model": model, "layers": 2, "contexts": MIX[-rows:][::-1],
                "alone": True,
            }  # fmt: skip


def repeats(model: str) -> Iterator[Case]:
    for rows in (1, 8, 4):
        options = {"delays": rows == 4}
        yield {
            "kind": "repeat", "model": model, "layers": 2, "contexts": same(rows),
            "options": options,
        }  # fmt: skip


def walks(model: str) -> Iterator[Case]:
    for page in (64, 16):
        yield {
            "kind": "walk", "model": model, "layers": 2, "contexts": same(16), "block_size": page,
            "steps": 10_000 if page == 64 else 1_000,
        }  # fmt: skip


def sanitized() -> Iterator[Case]:
    """Cases that `compute-sanitizer` gets through in a minute, with `--worker 0 --patience 120`."""
    for rows in (1, 8, 16):
        yield {"kind": "check", "model": "small", "contexts": MIX[:rows], "alone": True}


def variants(model: str) -> Iterator[Case]:
    for rows in (1, 8):
        yield {
            "kind": "time", "model": model, "contexts": same(rows), "options": {"trace": True},
        }  # fmt: skip
        for flight in (1, 3, 4, 6):
            options: dict[str, Any] = {"in_flight": flight}
            yield {"kind": "time", "model": model, "contexts": same(rows), "options": options}
    options = {"flagged": False}
    yield {"kind": "time", "model": model, "contexts": same(1), "options": options}


def cases_of(args: argparse.Namespace) -> list[Case]:
    kinds = {
        "check": lambda: checks(args.model),
        "time": lambda: times(args.model),
        "others": others,
        "repeat": lambda: repeats(args.model),
        "walk": lambda: walks(args.model),
        "sanitized": sanitized,
        "variants": lambda: variants(args.model),
    }
    return [case for kind in args.only for case in kinds[kind]()]


def name_of(case: Case) -> str:
    layers = f"/{case['layers']}" if case.get("layers") else ""
    options = " ".join(f"{k}={v}" for k, v in case.get("options", {}).items())
    rows, page = len(case["contexts"]), case.get("block_size", 64)
    return f"{case['kind']:6} {case['model']}{layers} rows {rows:2} block {page} {options}"


# -- the engine's operators -----------------------------------------------------------------------


class GivenWeights(Weights):
    """Weights by name, out of fused tensors that are there already."""

    def __init__(self, shape: Shape, weights: ModelWeights) -> None:
        self.dtype, self.device = torch.bfloat16, weights.embed.device
        self._tensors = {
            "model.embed_tokens.weight": weights.embed,
            "model.norm.weight": weights.norm,
            "lm_head.weight": weights.head,
        }
        for index, layer in enumerate(weights.layers):
            self._add_layer(shape, f"model.layers.{index}", layer)

    def _add_layer(self, shape: Shape, prefix: str, layer: Any) -> None:
        kv = shape.kv_heads * shape.head_dim
        named = self._tensors
        for kind, fused in (("weight", layer.qkv), ("bias", layer.bias)):
            if fused is not None:
                for name, part in zip("qkv", fused.split([shape.width, kv, kv]), strict=True):
                    named[f"{prefix}.self_attn.{name}_proj.{kind}"] = part
        for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            named[f"{prefix}.mlp.{name}_proj.weight"] = part
        named[f"{prefix}.self_attn.o_proj.weight"] = layer.o
        named[f"{prefix}.mlp.down_proj.weight"] = layer.down
        named[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
        named[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
        named[f"{prefix}.input_layernorm.weight"] = layer.norm1
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.norm2

    def load(self, name: str, *shape: int, rows: Any = None, columns: Any = None) -> torch.Tensor:
        tensor = self._tensors[name]
        assert tuple(tensor.shape) == shape, name
        return tensor


def config_of(shape: Shape) -> ModelConfig:
    family = "Qwen3" if shape.qk_norm else "Qwen2" if shape.qkv_bias else "Llama"
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=40960,
        rms_norm_eps=EPS,
        rope=RopeConfig("default", 1e6),
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
        output_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(),
    )


class Operators:
    """A decode step by the engine's operators, head included."""

    def __init__(self, shape: Shape, weights: ModelWeights) -> None:
        from nanoactor.models.devices.cuda import CUDADevice

        self.device = CUDADevice()
        self.device.prepare_thread(1)
        self.shape = shape
        given, longest = GivenWeights(shape, weights), LONGEST + 512
        self.decoder = Decoder(config_of(shape), given, self.device, longest)
        self.hidden = self.logits = torch.empty(0)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines as the decoder has them."""
        rope = self.decoder._rope
        return rope.cos, rope.sin

    def step(self, shape: Shape, inputs: StepInputs, caches: list[KVCache]) -> Any:
        rows = shape.rows
        scratch = self.device.scratch(rows, shape.heads, shape.kv_heads, shape.head_dim, 64)
        nothing = torch.zeros(4, 0, dtype=torch.int32, device=DEVICE)
        batch = AttentionBatch(
            inputs.slot_mapping, inputs.tables, shape.block_size, 0, nothing, nothing[:2],
            inputs.slots, inputs.contexts, NO_SEQ_LENS,
        )  # fmt: skip

        def run() -> None:
            planned = self.device.plan(scratch, batch)
            self.hidden = self.decoder.forward(inputs.token_ids, inputs.positions, caches, planned)
            self.logits = self.decoder.logits(self.hidden)

        return run


# -- a worker -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """The tensors and operators that cases of one model share."""

    weights: ModelWeights
    operators: Operators
    maps: list[bytes]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative; NaN where anything is not a number."""
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
            weights = random_weights(shape, generator)
            operators = Operators(shape, weights)
            cos, sin = operators.tables()
            weights = dataclasses.replace(weights, cos=cos, sin=sin)
            self.models[key] = Model(weights, operators, maps_of(shape, weights))
        return self.models[key]

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        shape = shape_of(case, self.blocks)
        why = refusal(shape)
        if why:
            return {"refused": why}
        model = self.model(case, shape)
        self.step = DecodeStep(shape, model.weights, EPS, self.patience, model.maps)
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
        """Compare with the reference: hidden states, logits, the new tokens' keys and values."""
        written = []
        for index, cache in enumerate(caches):
            for held, right in (
                (cache.keys, wanted.keys[index]),
                (cache.values, wanted.values[index]),
            ):
                written.append(difference(held.flatten(0, 1)[inputs.slot_mapping], right))
        return {
            "hidden": difference(step.hidden, wanted.hidden),
            "logits": difference(step.logits, wanted.logits),
            "written": max(written),
            "argmax": int((step.logits.argmax(-1) == wanted.logits.argmax(-1)).sum()),
        }

    def compare(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> Any:
        """Run both on the same inputs: (errors of both, inputs, caches)."""
        step = self.step
        assert step is not None
        inputs, caches = self.inputs(case, shape, g)
        kind = torch.float64 if shape.layers <= 4 else torch.float32
        wanted = expected_of(shape, model.weights, caches, inputs, kind)
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
        }
        if not case.get("alone"):  # the operators are compiled for each model
            model.operators.step(shape, inputs, before)()
            found["operators"] = self.errors(shape, wanted, model.operators, inputs, before)
        return found, inputs, caches

    @staticmethod
    def touched(inputs: StepInputs, caches: list[KVCache], others: list[KVCache]) -> int:
        """Count values that the step has changed beside the new tokens'."""
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
            ours[name] <= (1.05 * theirs[name] if theirs else 1e-2)
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
        found["good"] = found["same"] and found["kernel"]["hidden"] <= found["operators"]["hidden"]
        if not case.get("options"):
            run = model.operators.step(shape, inputs, caches)
            found["operators_ms"] = clocked(captured(run), 30)
        else:
            found["trace"] = phases_of(step.scratch.trace) if shape.trace else None
        moved = bytes_of(shape, case["contexts"])
        name = torch.cuda.get_device_name()
        floor = moved / (4.28e12 if "H200" in name else 3.0e12) * 1e3
        found |= {
            "GB/s": moved / found["ms"] / 1e6,
            "floor": floor,
            "of_floor": floor / found["ms"],
        }
        return found

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
        good = unlike == 0 and worst < 0.1
        return {"good": good, "unlike": unlike, "worst": worst, "count": count}

    def walk(self, case: Case, shape: Shape, model: Model, g: torch.Generator) -> dict[str, Any]:
        """Thousands of steps of a batch that changes, all logits beside the operators', and one
        step in 97 beside float64."""
        sizes = (1, 2, 4, 8, 16)
        shapes = {rows: dataclasses.replace(shape, rows=rows) for rows in sizes}
        steps = {
            rows: DecodeStep(of, model.weights, EPS, self.patience, model.maps)
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
        return {
            "good": worst < 0.1 and 0 < ours < 1.05 * theirs,
            "count": count, "worst": worst, "unlike": 0, "error": ours / theirs,
            "joined": walk.joined, "left": walk.left, "page ends": walk.page_ends,
            "longest": walk.longest,
        }  # fmt: skip


def bytes_of(shape: Shape, contexts: list[int]) -> int:
    """Bytes that a step must read: weights and cache, once."""
    layer = shape.hidden * (shape.qkv + shape.width + 3 * shape.inter)
    weights = shape.layers * layer + shape.vocab * shape.hidden
    return 2 * weights + 4 * shape.layers * sum(contexts) * shape.kv_heads * shape.head_dim


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


def phases_of(trace: torch.Tensor) -> dict[str, int]:
    """Cycles of block 0 from mark to mark: medians over layers."""
    marks = trace.cpu()
    layers = len(marks) - 1
    names = [f"{phase.name.lower()} {end}" for phase in PHASES for end in ("inputs", "end")]
    wanted = [i for i in range(len(names)) if names[i] != "combine inputs"]
    found, last = {}, marks[: layers - 1, 2 * len(PHASES) - 1]
    for index in wanted:
        here = marks[1:layers, index]
        found[names[index]] = int((here - last).float().median())
        last = here
    found["layer"] = int((marks[2:layers, 1] - marks[1 : layers - 1, 1]).float().median())
    head = marks[layers]
    found["final inputs"] = int(head[12] - marks[layers - 1, 11])
    found["head"] = int(head[13] - head[12])
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
            worker.step.check()
        where = ""
    except RuntimeError as stopped:
        where = str(stopped)
    return {"good": False, "stopped": where, "error": f"{type(error).__name__}: {str(error)[:600]}"}


# -- the parent -----------------------------------------------------------------------------------


def compile_one(shape: Shape) -> str:
    """Compile for the disk's cache; returns what went wrong."""
    try:
        compiled(shape)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def prepare(cases: list[Case], blocks: int) -> None:
    """Compile all kernels side by side (NVRTC has one lock in a process)."""
    shapes = list(dict.fromkeys(shape for case in cases for shape in shapes_of(case, blocks)))
    begin = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    most = max(1, min(12, (os.cpu_count() or 1) - 2, len(shapes)))
    with concurrent.futures.ProcessPoolExecutor(most, mp_context=spawn) as pool:
        errors = [error for error in pool.map(compile_one, shapes) if error]
    seconds = time.monotonic() - begin
    print(f"{len(shapes)} kernels compiled in {seconds:.1f} s, {len(errors)} failed", flush=True)
    for error in errors[:1]:
        print(error[:3000], flush=True)


def summary(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    verdict = "ok  " if found.get("good") else "BAD "
    if "stopped" in found:
        return f"{verdict}{found['stopped'] or '(no phase)'} | {found['error']}"
    parts = []
    if "ms" in found:
        parts.append(
            f"{found['ms']:.3f} ms {found['GB/s']:.0f} GB/s {found['of_floor']:.0%} of floor"
        )
    if "operators_ms" in found:
        parts.append(f"operators {found['operators_ms']:.3f} ms")
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
    kinds = ("check", "time", "others", "repeat", "walk", "variants", "sanitized")
    parser.add_argument("--model", choices=SIZES, default="0.6b")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds[:-1])
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
