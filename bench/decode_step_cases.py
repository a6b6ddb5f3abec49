"""Cases of `bench/decode_step.py`: models, rows, contexts, and what is asked of each."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape
from nanoactor.models.weights.whole_step import Mixture

Case = dict[str, Any]
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
    "30b-a3b": {
        "layers": 48, "hidden": 2048, "inter": 768, "heads": 32, "kv_heads": 4,
        "mixture": Mixture(experts=128, top_k=8, inner=768, renormalize=True),
    },
    "small": {
        "layers": 2, "hidden": 1024, "inter": 2048, "heads": 8, "kv_heads": 4, "vocab": 4096,
    },
}  # fmt: skip
SIZES |= {
    f"{name}-fp8": {**SIZES[name], "packed": True} for name in ("8b", "0.6b", "30b-a3b", "small")
}
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


def same(rows: int) -> list[int]:
    return [1024 + 5 * row for row in range(rows)]


def checks(model: str) -> Iterator[Case]:
    for context in (777, 1040, 2300):  # 9 to 18 parts, not a power of two
        yield {"kind": "check", "model": model, "layers": 2, "contexts": [context]}
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
    # Of more rows than a kernel has, by operators alone.
    for rows in (1, 8, 2, 4, 16, 64, 256):
        contexts = [1024 + row % 16 for row in range(rows)]
        yield {"kind": "time", "model": model, "contexts": contexts}


def context_lengths(model: str) -> Iterator[Case]:
    """One row whose context is divided among more and more blocks."""
    for context in (512, 1024, 1040, 1100, 2000, 4000, 16000):
        yield {"kind": "time", "model": model, "contexts": [context], "options": {"trace": False}}


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
    """Cases for `compute-sanitizer`, with `--worker 0 --patience 120`; a minute with each tool."""
    for rows in (1, 8, 16):
        yield {
            "kind": "check", "model": "small", "contexts": MIX[:rows], "alone": True,
            "options": {"fixed_registers": True},
        }  # fmt: skip


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
        "contexts": lambda: context_lengths(args.model),
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
