"""The GPU's kernels alone: bandwidth of paged decode attention, rate of prefill attention.

    python bench/kernels.py [--tests decode,prefill] [--tune] [--out FILE]

Decode attention is timed inside a CUDA graph of several layers, whose caches are larger than the
L2 cache; GB/s count each key and value once. Prefill: the kernel whose keys and values come by TMA
and the one that other GPUs get take turns, in graphs of several calls. Where FlashInfer is
installed it is timed on the same tensors. `--tune` tries other tiles, warps and stages. Each case
is checked against float64 on samples; outputs are NaN before, and so is what may not be read.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.devices.cuda.kernels import decode_attention as decode
from nanoactor.models.devices.cuda.kernels.prefill import HOPPER, PrefillAttention
from nanoactor.models.devices.cuda.kernels.prefill_attention import tokens_per_program
from nanoactor.models.devices.cuda.kernels.prefill_attention_tma import NARROW, WIDE, Variant
from nanoactor.models.seq_lens import NO_SEQ_LENS

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
                decode._LARGE_BLOCK_CONFIG = decode._SMALL_BLOCK_CONFIG = warps, stages
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
    """Rows of (new tokens, context at the end); NaN wherever no prompt may read."""

    block_size = 64

    def __init__(self, name: str, heads: int, rows: list[tuple[int, int]], size: int = SIZE):
        self.name, self.rows, self.size = f"{name}, {heads} heads of {size}", rows, size
        blocks = [-(-context // self.block_size) for _, context in rows]
        shuffled = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(1)).int()
        tables = torch.full((len(rows), max(blocks)), int(shuffled[-1]), dtype=torch.int32)
        shape = (len(shuffled), self.block_size, KV_HEADS, size)
        cache = torch.full((2, *shape), math.nan, dtype=torch.bfloat16, device="cuda")
        for row, part in enumerate(shuffled.split([*blocks, 1])[:-1]):
            tables[row, : len(part)] = part
            context = rows[row][1]
            flat = torch.full((2, len(part) * self.block_size, *shape[2:]), math.nan, device="cuda")
            flat[:, :context] = torch.randn(2, context, *shape[2:], device="cuda")
            cache[:, part.long().cuda()] = flat.unflatten(1, (len(part), -1)).bfloat16()
        self.cache = KVCache(cache[0].contiguous(), cache[1].contiguous())
        self.firsts = [0, *itertools.accumulate(count for count, _ in rows)]
        shape = (self.firsts[-1], heads, size)
        self.queries = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        each = tokens_per_program(heads, KV_HEADS)
        tiles = [(r, t) for r, (count, _) in enumerate(rows) for t in range(-(-count // each))]
        lines = [(r, self.firsts[r], *rows[r]) for r in range(len(rows))]
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        self.batch = AttentionBatch(
            none.long(),
            tables.cuda(),
            self.block_size,
            self.firsts[-1],
            torch.tensor(lines, dtype=torch.int32).T.contiguous().cuda(),
            torch.tensor(tiles, dtype=torch.int32).T.contiguous().cuda(),
            none,
            none,
            NO_SEQ_LENS,
        )
        # Each query sees the positions up to its own: two products of 2 x size operations each.
        pairs = sum(count * (end - count) + count * (count + 1) // 2 for count, end in rows)
        self.flops = 4 * heads * size * pairs

    def call(self, kernel: PrefillAttention):
        """Return what may be timed, and where it writes."""
        output = torch.full_like(self.queries, math.nan)
        scale = self.size**-0.5
        arguments = (self.queries, self.cache, self.batch, scale, output)
        return functools.partial(kernel, *arguments), output

    def error(self, output: torch.Tensor) -> float:
        """The largest relative error of some tokens of some rows; NaN where one is missing."""
        if not output.isfinite().all():
            return math.nan
        rng, worst = random.Random(3), 0.0
        for row in {0, len(self.rows) // 2, len(self.rows) - 1}:
            count, context = self.rows[row]
            blocks = self.batch.tables[row, : -(-context // self.block_size)].long()
            keys, values = (
                x[blocks].flatten(0, 1)[:context].double()
                for x in (self.cache.keys, self.cache.values)
            )
            for token in {0, count // 2, count - 1, *(rng.randrange(count) for _ in range(8))}:
                at, seen = self.firsts[row] + token, context - count + token + 1
                query = self.queries[at].double().unflatten(0, (KV_HEADS, -1))
                scores = torch.einsum("kgd,nkd->kgn", query, keys[:seen]) * self.size**-0.5
                right = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values[:seen]).flatten(
                    0, 1
                )
                error = (output[at].double() - right).norm() / right.norm()
                worst = max(worst, float(error))
        return worst

    def flashinfer(self, backend: str):
        """Return what may be timed; its first call compiles."""
        import flashinfer as library

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        blocks = [-(-context // self.block_size) for _, context in self.rows]
        tables = [self.batch.tables[row, :count] for row, count in enumerate(blocks)]
        last = [(context - 1) % self.block_size + 1 for _, context in self.rows]
        wrapper.plan(
            torch.tensor(self.firsts, dtype=torch.int32).cuda(),
            torch.tensor([0, *itertools.accumulate(blocks)], dtype=torch.int32).cuda(),
            torch.cat(tables),
            torch.tensor(last, dtype=torch.int32).cuda(),
            self.queries.shape[1],
            KV_HEADS,
            self.size,
            self.block_size,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return lambda: wrapper.run(self.queries, (self.cache.keys, self.cache.values))


def in_turn(functions: dict, many: int) -> dict[str, float]:
    """Microseconds of one call of each, in graphs of so many that take turns; medians."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(many):
                function()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(10):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / many * 1e3)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


def mixed_lengths() -> list[tuple[int, int]]:
    rng = random.Random(7)
    return [(length, length) for length in (rng.randint(128, 1024) for _ in range(16))]


PREFILLS = {
    "8 x 8192": [(8192, 8192)] * 8,
    "2048 on 30000": [(2048, 32048)],
    "512 on 30000": [(512, 30512)],
    "16 of 128 to 1024": mixed_lengths(),
    "32 x 512": [(512, 512)] * 32,
    "1 x 2048": [(2048, 2048)],
    "1 x 1280": [(1280, 1280)],
    "1 x 1024": [(1024, 1024)],
    "1 x 512": [(512, 512)],
    "1 x 100": [(100, 100)],
}
MORE_HEADS = ("8 x 8192", "2048 on 30000", "16 of 128 to 1024", "1 x 1024", "1 x 512")


def prefill_cases():
    for name, rows in PREFILLS.items():
        yield PrefillCase(name, 16, rows)
    for name in MORE_HEADS:
        yield PrefillCase(name, 32, PREFILLS[name])
    yield PrefillCase("8 x 8192", 16, PREFILLS["8 x 8192"], 64)


def only(variant: Variant) -> PrefillAttention:
    return PrefillAttention((HOPPER, 0), 0, (variant, variant))


def prefill_rows(tune: bool) -> list[dict]:
    """The kernel that a GPU before Hopper gets, and the one that this GPU gets."""
    results = []
    found = torch.cuda.get_device_properties(0)
    kernels = {"without TMA": PrefillAttention((8, 0), 0)}
    if found.major == HOPPER:
        capability = found.major, found.minor
        kernels["by TMA"] = PrefillAttention(capability, found.multi_processor_count)
        if tune:
            kernels["wide"], kernels["narrow"] = only(WIDE), only(NARROW)
            uncapped = dataclasses.replace(WIDE, registers=None)
            kernels["wide, no cap"] = only(uncapped)
            kernels["wide, 3 stages"] = only(dataclasses.replace(WIDE, stages=3))
    for case in prefill_cases():
        calls = {name: case.call(kernel) for name, kernel in kernels.items()}
        functions, first = {name: call for name, (call, _) in calls.items()}, {}
        for backend in ("fa2", "fa3"):
            begin = time.time()
            try:
                functions[f"flashinfer {backend}"] = case.flashinfer(backend)
                functions[f"flashinfer {backend}"]()
            except ImportError:
                break
            first[f"flashinfer {backend}"] = time.time() - begin
        many = max(2, min(20, int(4e11 / case.flops)))
        taken = in_turn(functions, many)
        for name, us in taken.items():
            row = {"case": case.name, "kernel": name, "us": us}
            row |= {"TFLOP_per_s": case.flops / us / 1e6, "of_the_first": us / taken["without TMA"]}
            if name in calls:
                row["error"] = case.error(calls[name][1])
            if name in first:
                row["first_call_s"] = first[name]
            results.append(row)
            print(json.dumps(row), flush=True)
        del case, calls, functions
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tests", default="decode,prefill")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tests = {"decode": decode_rows, "prefill": prefill_rows}
    asked = args.tests.split(",")
    result = {
        "question": "how fast are the attention kernels alone?",
        "command": f"python bench/kernels.py --tests {args.tests}" + " --tune" * args.tune,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        **{name: test(args.tune) for name, test in tests.items() if name in asked},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
