"""Dense products of FP8 matrices on a GPU, compared with bfloat16.

    python bench/fp8_products.py [--model 8b] [--rows 1 64 4096] [--rounds 20] [--out FILE]

Times a layer's products (queries to values, output, gates and ups, down) in a graph of several
layers whose weights are larger than any cache, with the rounding of activations: as the engine runs
them (`engine`: with many rows the kernels in CUDA C++), by the kernels in Triton (`triton`), and in
bfloat16 (`bf16`, torch.mm). `bandwidth` relates the matrices' bytes to what a sum of 4 GB reads;
`of_bf16` is bfloat16's time over the engine's, `tflops` the engine's operations per second.
`mlp_us` is the feed-forward operator (the last two products and SwiGLU): as the engine runs it
(`engine`), with separate operators (`separate`), with those in Triton (`triton`), and in bfloat16
(`bf16`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.experts import bandwidth, matrices, milliseconds, write_report
from nanoactor.models.devices.cuda.device import CUDADevice
from nanoactor.models.devices.cuda.kernels.fp8 import TritonFp8Linear

LAYERS = 4
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
SHAPES = {
    "8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "30b-a3b": ((5120, 2048), (2048, 4096)),
}
"""(outputs, inputs) of a layer's matrices."""

Product = Callable[[torch.Tensor], torch.Tensor]


def times(
    layers: Sequence[Sequence[Product]], shapes: Sequence[tuple[int, int]], rows: int, rounds: int
) -> list[float]:
    """Microseconds of each product."""
    found = []
    for number, (_, inputs) in enumerate(shapes):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        products = [layer[number] for layer in layers]

        def run(x: torch.Tensor = x, products: list[Product] = products) -> None:
            for product in products:
                product(x)

        found.append(milliseconds(run, rounds) / LAYERS * 1e3)
    return found


def mlp_times(
    device: CUDADevice, layers: dict[str, list[list[Product]]], hidden: int, rows: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a feed-forward operator whose projections are the last two products."""
    made: dict[str, list[Product]] = {
        "engine": [device.mlp(*layer[-2:]) for layer in layers["engine"]],
    }
    for kind, of in (("separate", "engine"), ("triton", "triton"), ("bf16", "bf16")):
        made[kind] = [
            lambda x, gate_up=layer[-2], down=layer[-1]: down(device.swiglu(gate_up(x)))
            for layer in layers[of]
        ]
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    found = {}
    for kind, operators in made.items():

        def run(operators: list[Product] = operators) -> None:
            for operator in operators:
                operator(x)

        found[kind] = round(milliseconds(run, rounds) / LAYERS * 1e3, 1)
    return found


def measure(args: argparse.Namespace, copy: float) -> list[dict]:
    device, shapes = CUDADevice(), SHAPES[args.model]
    packed = [[matrices("fp8", *shape) for shape in shapes] for _ in range(LAYERS)]
    kinds: dict[str, list[list[Product]]] = {
        "engine": [[device.linear(one) for one in layer] for layer in packed],
        "triton": [[TritonFp8Linear(one) for one in layer] for layer in packed],
        "bf16": [
            [partial(torch.mm, mat2=matrices("bf16", *shape).weight.t()) for shape in shapes]
            for _ in range(LAYERS)
        ],
    }
    results = []
    for rows in args.rows:
        found = {kind: times(layers, shapes, rows, args.rounds) for kind, layers in kinds.items()}
        spent = {kind: sum(each) for kind, each in found.items()}
        size = sum(outputs * inputs for outputs, inputs in shapes)
        results.append(
            {
                "rows": rows,
                **{f"{kind}_us": [round(one, 1) for one in each] for kind, each in found.items()},
                **{f"{kind}_layer_us": round(total, 1) for kind, total in spent.items()},
                "bandwidth": round(size / spent["engine"] * 1e6 / copy, 3),
                "tflops": round(2 * rows * size / spent["engine"] / 1e6, 1),
                "of_bf16": round(spent["bf16"] / spent["engine"], 2),
                **(
                    {"mlp_us": mlp_times(device, kinds, shapes[-2][1], rows, args.rounds)}
                    if args.model == "8b"
                    else {}
                ),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    with torch.inference_mode():
        copy = bandwidth(args.rounds)
        print(f"{torch.cuda.get_device_name()}: a sum reads {copy / 1e12:.2f} TB/s")
        results = measure(args, copy)
    write_report(args.out, copy, {"model": args.model}, results)


if __name__ == "__main__":
    main()
