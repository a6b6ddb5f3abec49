"""Decode attention by the length of the chunks into which contexts are split.

    python bench/decode_chunks.py [--rounds 10] [--out FILE]

For batches of similar, mixed and very different lengths: the time of a layer's attention with the
chunks that `plan_splits` chooses (`planned_us`), and with chunks of other lengths (`us`, by the
number of tiles of 64 positions), beside the time in which the cache's bytes can be read.
`items` is the number of chunks, and `places` the number that run at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.experts import bandwidth, milliseconds, write_report
from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels import decode_attention as decode

LAYERS, HEADS, SIZE, BLOCK, TILE = 4, 32, 128, 64, 64


def cases() -> dict[str, list[int]]:
    """Context lengths by name."""
    draw = random.Random(1)
    found = {f"{rows} similar": [1024 + 5 * (row % 64) for row in range(rows)] for rows in ROWS}
    for rows in (16, 64, 128):
        found[f"{rows} mixed"] = [draw.randint(64, 4000) for _ in range(rows)]
        found[f"{rows} with a long one"] = [16000] + [
            draw.randint(64, 600) for _ in range(rows - 1)
        ]
    return found


ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 256)


class Batch:
    """Caches, block tables and queries of some rows."""

    def __init__(self, kv_heads: int, contexts: list[int]) -> None:
        blocks = [-(-context // BLOCK) for context in contexts]
        shape = sum(blocks) + 1, BLOCK, kv_heads, SIZE
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.caches = [
            KVCache(torch.randn(shape, **options), torch.randn(shape, **options))
            for _ in range(LAYERS)
        ]
        order = torch.randperm(sum(blocks), device="cuda").int()
        tables = [torch.nn.functional.pad(one, (0, max(blocks))) for one in order.split(blocks)]
        self.tables = torch.stack([one[: max(blocks)] for one in tables]).contiguous()
        rows = len(contexts)
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        self.queries = torch.randn(rows, HEADS, SIZE, **options)
        self.output = torch.empty_like(self.queries)
        self.splits = decode.Splits.empty(rows, HEADS, kv_heads, SIZE, torch.device("cuda"))

    def microseconds(self, rounds: int) -> float:
        def run() -> None:
            for cache in self.caches:
                decode.decode_attention(
                    self.queries, cache, self.tables, self.slots, self.contexts, self.splits,
                    SIZE**-0.5, self.output,
                )  # fmt: skip

        return round(milliseconds(run, rounds) / LAYERS * 1e3, 1)

    def split(self, tiles: list[int], length: int) -> None:
        """Split every row, of so many tiles, into chunks of `length` tiles."""
        counts = [-(-count // length) for count in tiles]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        places = [index for count in counts for index in range(count)]
        firsts = [sum(counts[:row]) for row in range(len(counts))]
        for target, values in (
            (self.splits.rows[: len(rows)], rows),
            (self.splits.chunk_indices[: len(rows)], places),
            (self.splits.first_items, firsts),
            (self.splits.plan, [length * TILE, len(rows)]),
        ):
            target.copy_(torch.tensor(values, dtype=torch.int32))


def measure(name: str, kv_heads: int, contexts: list[int], copy: float, rounds: int) -> dict:
    batch = Batch(kv_heads, contexts)
    decode.plan_splits(batch.contexts, batch.splits)
    planned, chunk = batch.microseconds(rounds), int(batch.splits.plan[0]) // TILE
    expected = batch.output.float()
    tiles = [-(-context // TILE) for context in contexts]
    shortest = max(1, -(-sum(tiles) // (len(batch.splits.rows) - len(tiles))))
    lengths = {shortest} | {-(-max(tiles) // parts) for parts in (1, 2, 3, 4, 6, 8, 12, 16)}
    found, items = {}, {}
    for length in sorted(length for length in lengths if length >= shortest):
        batch.split(tiles, length)
        found[length], items[length] = batch.microseconds(rounds), int(batch.splits.plan[1])
        assert (batch.output.float() - expected).abs().max() < 0.02
    return {
        "rows": name,
        "kv_heads": kv_heads,
        "floor_us": round(sum(contexts) * kv_heads * SIZE * 4 / copy * 1e6, 1),
        "planned_us": planned,
        "planned": chunk,
        "us": found,
        "items": items,
        "places": batch.splits.chunks_per_wave,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    results = []
    with torch.inference_mode():
        copy = bandwidth(args.rounds)
        for kv_heads in (4, 8):
            for name, contexts in cases().items():
                results.append(measure(name, kv_heads, contexts, copy, args.rounds))
                print(json.dumps(results[-1]), flush=True)
    write_report(args.out, copy, {"head_dim": SIZE, "heads": HEADS}, results)


if __name__ == "__main__":
    main()
