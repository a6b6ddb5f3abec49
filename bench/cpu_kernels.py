"""Microseconds of the CPU's kernels, PyTorch's and oneDNN's operators, by number of threads.

    python bench/cpu_kernels.py [--threads 1 2] [--dtypes float32 bfloat16] [--rounds 5]
                                 [--out FILE]

Shapes of Qwen3-0.6B: norms and SwiGLU of so many tokens, products of so many rows with each of a
layer's weights (alternating with other weights, so that they come from memory) and of the demo's,
and decode attention of rows with contexts of one length. Both sides alternate; medians. From these
figures come the limits in `models/devices/cpu/compiled.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import torch

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
from nanoactor.models.devices.cpu.device import CPUDevice
from nanoactor.models.devices.cpu.kernels.attention import decode_attention
from nanoactor.models.devices.cpu.kernels.elementwise import add_rms_norm, swiglu
from nanoactor.models.devices.cpu.kernels.linear import few_row_linear
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.linear import Dense

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 1024, 3072, 16, 8, 128, 16
WEIGHTS = {"qkv": (4096, 1024), "out": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
SMALL = {"small qkv": (768, 256), "small gate_up": (1280, 256), "small down": (256, 640)}
OTHERS = 8
"""Weights of a shape, so that no large one is found in a cache."""
Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Of one call, over about 20 ms."""
    begin = time.perf_counter()
    work()
    calls = max(1, min(200, int(0.02 / max(1e-7, time.perf_counter() - begin))))
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def compare(rounds: int, ours: Work, theirs: Work) -> dict[str, float]:
    """Microseconds of both, measured alternately."""
    times: dict[str, list[float]] = {"ours": [], "pytorch": []}
    for work in (ours, theirs):
        work()
    for _ in range(rounds):
        times["ours"].append(seconds(ours))
        times["pytorch"].append(seconds(theirs))
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in times.items()}


def in_turn(operators: list[Callable[[torch.Tensor], object]], x: torch.Tensor) -> Work:
    """Call another operator each time."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        operators[calls % len(operators)](x)

    return call


def attention_case(dtype: torch.dtype, rows: int, context: int) -> tuple[torch.Tensor, ...]:
    blocks = -(-context // BLOCK)
    shape = rows * blocks, BLOCK, KV_HEADS, HEAD_DIM
    tables = torch.randperm(rows * blocks).int().view(rows, blocks)
    queries = torch.randn(rows, HEADS, HEAD_DIM).to(dtype)
    return queries, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), tables


def batch_of(device: CPUDevice, tables: torch.Tensor, context: int) -> AttentionBatch:
    rows = len(tables)
    nothing = torch.empty(4, 0, dtype=torch.int32)
    batch = AttentionBatch(
        torch.empty(0, dtype=torch.int64),
        tables,
        BLOCK,
        prefill_tokens=0,
        prefill_rows=nothing,
        prefill_tiles=nothing[:2],
        decode_slots=torch.arange(rows, dtype=torch.int32),
        decode_contexts=torch.full((rows,), context, dtype=torch.int32),
        lengths=HostSeqLens([], [], [context] * rows),
    )
    return device.plan(None, batch)


def measure(dtype: torch.dtype, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """All cases."""
    device, plain, found = CompiledCPUDevice(), CPUDevice(), {}
    device.prepare_thread(threads)
    device.check(dtype, BLOCK, HEAD_DIM)
    weight = torch.ones(HIDDEN, dtype=dtype)
    for tokens in (1, 32, 256, 1024, 4096):
        x, both = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, 2 * INNER).to(dtype)
        found[f"norm of {tokens}"] = compare(
            rounds,
            lambda x=x: add_rms_norm(x, x, weight, 1e-6),
            lambda x=x: plain.add_rms_norm(x, x, weight, 1e-6),
        )
        found[f"swiglu of {tokens}"] = compare(
            rounds, lambda x=both: swiglu(x), lambda x=both: plain.swiglu(x)
        )
    for name, shape in (WEIGHTS | SMALL).items():
        weights = [device.zeros(*shape, dtype=dtype).normal_() for _ in range(OTHERS)]
        packed = [plain.linear(Dense(w)) for w in weights]
        own = [lambda x, w=w: few_row_linear(x, w, None, threads) for w in weights]
        for rows in (1, 2, 4, 8):
            x = torch.randn(rows, shape[1]).to(dtype)
            found[f"{name} of {rows}"] = compare(rounds, in_turn(own, x), in_turn(packed, x))
    for rows, context in ((1, 200), (1, 4000), (32, 500)):
        queries, keys, values, tables = attention_case(dtype, rows, context)
        cache = KVCache(keys, values)
        ours, theirs = (batch_of(d, tables, context) for d in (device, plain))
        found[f"attention of {rows} x {context}"] = compare(
            rounds,
            lambda q=queries, c=cache, b=ours: decode_attention(q, c, b, 0.1, threads),
            lambda q=queries, c=cache, b=theirs: plain.attention(q, c, b, 0.1),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    given = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
    report: dict = {
        "question": "how fast are the CPU's kernels beside PyTorch's operators? microseconds",
        "command": " ".join(["python", "bench/cpu_kernels.py", *given]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }
    with torch.inference_mode():
        for name in args.dtypes:
            dtype: torch.dtype = getattr(torch, name)
            for threads in args.threads:
                found = measure(dtype, threads, args.rounds)
                report.setdefault(name, {})[str(threads)] = found
                print(name, threads, json.dumps(found), file=sys.stderr, flush=True)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
