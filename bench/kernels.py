"""The GPU's kernels alone: bandwidth of paged decode attention, rate of prefill attention.

    python bench/kernels.py [--tune] [--out FILE]

Decode attention is timed inside a CUDA graph of several layers, whose caches are larger than the
L2 cache; GB/s count each key and value once. Where FlashInfer is installed it is timed on the same
tensors. `--tune` tries other tiles, warps and stages. Each case is checked against float64.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import platform
import random
import sys
import time
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoactor.models.batch import KVCache
from nanoactor.models.kernels import decode_attention as decode
from nanoactor.models.kernels import prefill_attention as prefill

KV_HEADS, SIZE = 8, 128


class Case:
    """Rows with contexts of 200 to 1,500 tokens, or of one length, over shuffled blocks."""

    def __init__(self, rows: int, heads: int, block_size: int, layers: int, length: int = 0):
        rng = random.Random(7)
        self.heads, self.block_size, self.layers = heads, block_size, layers
        self.lengths = [length or rng.randint(200, 1500) for _ in range(rows)]
        self.blocks = [-(-n // block_size) for n in self.lengths]
        order = torch.randperm(sum(self.blocks), generator=torch.Generator().manual_seed(1)).int()
        tables = torch.zeros(rows, max(self.blocks), dtype=torch.int32)
        for row, part in enumerate(torch.split(order, self.blocks)):
            tables[row, : len(part)] = part
        self.order, self.tables = order.cuda(), tables.cuda()
        self.contexts = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        shape = (layers, sum(self.blocks), block_size, KV_HEADS, SIZE)
        self.keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.queries = torch.randn(layers, rows, heads, SIZE, device="cuda", dtype=torch.bfloat16)
        self.bytes = sum(self.lengths) * KV_HEADS * SIZE * 2 * 2

    def error(self, output: torch.Tensor, rows: list[int]) -> float:
        """The largest relative error of some rows of layer 0."""
        return max(self._error(output[row], row) for row in rows)

    def _error(self, output: torch.Tensor, row: int) -> float:
        blocks = self.tables[row, : self.blocks[row]].long()
        keys = self.keys[0][blocks].flatten(0, 1)[: self.lengths[row]].double()
        values = self.values[0][blocks].flatten(0, 1)[: self.lengths[row]].double()
        group = self.heads // KV_HEADS
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", self.queries[0, row].double(), keys) * SIZE**-0.5
        right = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        return float((output.double() - right).norm() / right.norm())


def microseconds(function, layers: int) -> float:
    """Of one layer, inside a graph; median."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5 / layers * 1e3)
    return sorted(times)[len(times) // 2]


def ours(case: Case) -> tuple[float, float]:
    rows = len(case.lengths)
    splits = decode.Splits.empty(rows, case.heads, KV_HEADS, SIZE, torch.device("cuda"))
    outputs = torch.full_like(case.queries, math.nan)
    decode.plan_splits(case.contexts, splits)

    def all_layers():
        for layer in range(case.layers):
            decode.decode_attention(
                case.queries[layer],
                KVCache(case.keys[layer], case.values[layer]),
                case.tables,
                case.slots,
                case.contexts,
                splits,
                SIZE**-0.5,
                outputs[layer],
            )

    taken = microseconds(all_layers, case.layers)
    return taken, case.error(outputs[0], [0, rows // 2, rows - 1])


def flashinfer(case: Case) -> tuple[float, float, float]:
    import flashinfer as library

    begin = time.time()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.tensor([0, *itertools.accumulate(case.blocks)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % case.block_size + 1 for n in case.lengths], dtype=torch.int32)
    wrapper.plan(
        starts.cuda(),
        case.order,
        last.cuda(),
        case.heads,
        KV_HEADS,
        SIZE,
        case.block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    outputs = torch.full_like(case.queries, math.nan)

    def all_layers():
        for layer in range(case.layers):
            outputs[layer] = wrapper.run(
                case.queries[layer], (case.keys[layer], case.values[layer])
            )

    all_layers()
    torch.cuda.synchronize()
    first = time.time() - begin
    taken = microseconds(all_layers, case.layers)
    rows = len(case.lengths)
    return taken, case.error(outputs[0], [0, rows // 2, rows - 1]), first


CASES = {
    "256 rows, 16 heads, block 64": (256, 16, 64, 4),
    "256 rows, 16 heads, block 16": (256, 16, 16, 4),
    "256 rows, 32 heads, block 64": (256, 32, 64, 4),
    "64 rows, 16 heads, block 64": (64, 16, 64, 8),
    "8 rows of 1,024, 16 heads, block 64": (8, 16, 64, 28, 1024),
    "1 row of 1,024, 16 heads, block 64": (1, 16, 64, 28, 1024),
    "1 row of 32,768, 32 heads, block 64": (1, 32, 64, 4, 32768),
}


def decode_rows(tune: bool) -> list[dict]:
    results = []
    variants = [(decode._TILE, 0, 0)]
    if tune:
        variants = [(64, 4, 3), (64, 4, 5), (64, 4, 7), (64, 2, 5), (64, 8, 5), (32, 4, 5)]
        variants += [(32, 2, 5), (32, 2, 7), (32, 1, 7), (128, 4, 3), (128, 4, 5), (128, 8, 5)]
    for name, shape in CASES.items():
        case = Case(*shape)
        for tile, warps, stages in variants:
            decode._TILE = tile
            if warps:
                decode._WHOLE_BLOCKS = decode._SMALL_BLOCKS = warps, stages
            try:
                taken, error = ours(case)
            except Exception as problem:
                print(name, tile, warps, stages, "failed", str(problem)[:200], flush=True)
                continue
            row = {
                "case": name,
                "kernel": f"triton {tile}/{warps}/{stages}" if warps else "triton",
                "us": taken,
            }
            row |= {"GB_per_s": case.bytes / taken / 1e3, "error": error}
            results.append(row)
            print(json.dumps(row), flush=True)
        try:
            taken, error, first = flashinfer(case)
            row = {"case": name, "kernel": "flashinfer", "us": taken, "first_call_s": first}
            row |= {"GB_per_s": case.bytes / taken / 1e3, "error": error}
            results.append(row)
            print(json.dumps(row), flush=True)
        except ImportError:
            pass
        del case
    return results


class PrefillCase:
    """Prompts of one length, none of it cached."""

    def __init__(self, heads: int, rows: int, tokens: int):
        self.name = f"prefill {rows} x {tokens}, {heads} heads"
        self.heads, self.rows, self.tokens = heads, rows, tokens
        block_size, total = 64, tokens * rows
        self.tables = torch.randperm(total // block_size, device="cuda").int().view(rows, -1)
        shape = (total // block_size, block_size, KV_HEADS, SIZE)
        keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.cache = KVCache(keys, values)
        self.queries = torch.randn(total, heads, SIZE, device="cuda", dtype=torch.bfloat16)
        self.flops = 4 * rows * heads * SIZE * tokens * (tokens + 1) / 2

    def ours(self) -> float:
        """Microseconds."""
        starts = torch.arange(self.rows, dtype=torch.int32) * self.tokens
        counts = torch.full((self.rows,), self.tokens, dtype=torch.int32)
        slots = torch.arange(self.rows, dtype=torch.int32)
        lines = torch.stack((slots, starts, counts, counts)).cuda()
        each = prefill.tokens_per_program(self.heads, KV_HEADS)
        tiles = [(r, t) for r in range(self.rows) for t in range(-(-self.tokens // each))]
        programs = torch.tensor(tiles, dtype=torch.int32).T.contiguous().cuda()
        output = torch.empty_like(self.queries)
        arguments = (self.queries, self.cache, self.tables, lines, programs, SIZE**-0.5, output)
        return self.timed(functools.partial(prefill.prefill_attention, *arguments))

    def flashinfer(self, backend: str) -> float:
        """Microseconds; the first call compiles."""
        import flashinfer as library

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        blocks = self.tokens // 64
        starts = torch.arange(self.rows + 1, dtype=torch.int32)
        wrapper.plan(
            (starts * self.tokens).cuda(),
            (starts * blocks).cuda(),
            self.tables.flatten(),
            torch.full((self.rows,), 64, dtype=torch.int32).cuda(),
            self.heads,
            KV_HEADS,
            SIZE,
            64,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return self.timed(lambda: wrapper.run(self.queries, (self.cache.keys, self.cache.values)))

    def timed(self, run) -> float:
        return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median") * 1e3


def prefill_rows(tune: bool) -> list[dict]:
    results = []
    variants = [(64, 8, 2)]
    if tune:
        variants += [(128, 8, 2), (128, 8, 3), (64, 4, 3), (64, 8, 3), (64, 8, 4)]

    def note(case: PrefillCase, kernel: str, taken: float) -> None:
        row = {"case": case.name, "kernel": kernel, "us": taken}
        row["TFLOP_per_s"] = case.flops / taken / 1e6
        results.append(row)
        print(json.dumps(row), flush=True)

    for shape in ((16, 8, 8192), (32, 8, 8192), (16, 1, 512), (16, 32, 512)):
        case = PrefillCase(*shape)
        for tile, warps, stages in variants:
            prefill._TILE, prefill._WARPS, prefill._STAGES = tile, warps, stages
            name = f"triton {tile}/{warps}/{stages}" if tune else "triton"
            try:
                note(case, name, case.ours())
            except triton.OutOfResources as problem:
                print(case.name, name, problem, flush=True)
        for backend in ("fa2", "fa3"):
            try:
                begin = time.time()
                taken = case.flashinfer(backend)
                note(case, f"flashinfer {backend}", taken)
                results[-1]["first_call_s"] = time.time() - begin
            except ImportError:
                break
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        "question": "how fast are the attention kernels alone?",
        "command": "python bench/kernels.py" + " --tune" * args.tune,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "decode": decode_rows(args.tune),
        "prefill": prefill_rows(args.tune),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
