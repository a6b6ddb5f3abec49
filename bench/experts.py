"""Grouped products of a mixture of experts on a GPU: what share of its bandwidth, and of its rate?

    python bench/experts.py [--format bf16|fp8] [--rows 1 8 64] [--hidden 2048]
                            [--inner 768] [--rounds 20] [--out FILE]

For rows of 1 to 4,096 tokens, experts of 8 to 128 and choices of 2 to 8: the time of a layer's
experts, routing aside, in a graph of several layers whose weights are larger than any cache, and
the time of the Triton kernels alone (`triton_ms`). Tokens choose experts uniformly, all different;
`distinct` experts are counted, and their bytes over the time are a share of what a sum of 4 GB
reads (`bandwidth`). With many rows the products are a share of those of one dense product of as
many rows in bfloat16 (`rate`). Routing alone (`route_us`) is a product and a choice.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoactor.models.devices.cuda.device import CUDADevice
from nanoactor.models.devices.cuda.kernels.experts import TritonExperts
from nanoactor.models.weights.fp8 import E4M3, Fp8Blocks
from nanoactor.models.weights.linear import Dense, ExpertWeights, LinearWeights, Router

LAYERS = 4
ROWS = (1, 8, 64, 256, 1024, 4096)
SHAPES = ((8, 2), (64, 8), (128, 8))


def milliseconds(function: Callable[[], object], rounds: int) -> float:
    """The median time of a graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        times = []
        for _ in range(rounds + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def bandwidth(rounds: int) -> float:
    """Bytes a second that are read by a sum."""
    source = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    return source.nbytes / milliseconds(source.sum, rounds) * 1e3


def rate(rows: int, hidden: int, inner: int, rounds: int) -> float:
    """Operations a second of dense products of so many rows."""
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3 * inner, hidden, device="cuda", dtype=torch.bfloat16)
    spent = milliseconds(lambda: torch.mm(x, weight.t()), rounds)
    return 2 * rows * hidden * 3 * inner / spent * 1e3


def matrices(format_: str, *shape: int) -> LinearWeights:
    """Random, in bfloat16 or in blocks of FP8."""
    numbers = torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    if format_ == "bf16":
        return Dense(numbers)
    scales = torch.ones(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device="cuda")
    return Fp8Blocks(numbers.to(E4M3), scales, 128, 0, torch.bfloat16, 128)


def measure(args: argparse.Namespace, rows: int, experts: int, chosen: int, copy: float) -> dict:
    device = CUDADevice()
    generator = torch.Generator("cuda").manual_seed(rows + experts)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [
        ExpertWeights(
            matrices(args.format, experts, 2 * args.inner, args.hidden),
            matrices(args.format, experts, args.hidden, args.inner),
        )
        for _ in range(LAYERS)
    ]
    operators = [device.experts(layer) for layer in layers]
    in_triton = [TritonExperts(layer, True) for layer in layers]
    x = torch.randn(rows, args.hidden, **options)
    drawn = torch.rand(LAYERS, rows, experts, device="cuda", generator=generator)
    ids = drawn.argsort(-1)[..., :chosen].int().contiguous()
    shares = torch.full((rows, chosen), 1 / chosen, device="cuda")
    distinct = statistics.mean(len(one.unique()) for one in ids)

    def step(operators: list) -> None:
        for operator, chosen_ids in zip(operators, ids, strict=True):
            operator(x, chosen_ids, shares)

    router = Router(torch.randn(experts, args.hidden, device="cuda"), chosen, True)
    spent, triton = (
        milliseconds(functools.partial(step, of), args.rounds) / LAYERS
        for of in (operators, in_triton)
    )
    routed = milliseconds(lambda: device.route(x, router), args.rounds)
    read = distinct * 3 * args.inner * args.hidden * (2 if args.format == "bf16" else 1)
    operations = 2 * rows * chosen * 3 * args.inner * args.hidden
    dense = rate(rows * chosen, args.hidden, args.inner, args.rounds)
    return {
        "rows": rows,
        "experts": experts,
        "chosen": chosen,
        "distinct": distinct,
        "ms": round(spent, 4),
        "triton_ms": round(triton, 4),
        "bandwidth": round(read / spent * 1e3 / copy, 3),
        "rate": round(operations / spent * 1e3 / dense, 3),
        "route_us": round(routed * 1e3, 1),
    }


def write_report(out: Path | None, copy: float, settings: dict, results: list[dict]) -> None:
    """Write results to a file, if one is given, with what is needed to repeat them."""
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sum_tb_s": copy / 1e12,
        **settings,
        "results": results,
    }
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--format", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    with torch.inference_mode():
        copy = bandwidth(args.rounds)
        print(f"{torch.cuda.get_device_name()}: a sum reads {copy / 1e12:.2f} TB/s")
        results = []
        for experts, chosen in SHAPES:
            for rows in args.rows:
                results.append(measure(args, rows, experts, chosen, copy))
                print(json.dumps(results[-1]))
    settings = {"format": args.format, "hidden": args.hidden, "inner": args.inner}
    write_report(args.out, copy, settings, results)


if __name__ == "__main__":
    main()
