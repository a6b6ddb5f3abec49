"""Measure which parts of a digit reader's checkpoint its answers depend on.

    python -m nanoactor.models.demo_vl.ablate models/demo_vl

Reports the share of exact answers on held-out pictures, in transformers and float32: unaltered,
with each deepstack level zeroed, and with rows and columns swapped in the decoder's positions. For
prompts with two pictures, reports the share of answers that change when the pictures are swapped.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nanoactor.models.demo_vl.evaluate import (
    Questions,
    Reader,
    fraction_true,
    held_out,
    held_out_pairs,
)
from nanoactor.models.demo_vl.layout import HELD_OUT_SEED
from nanoactor.models.demo_vl.render import Renderer

SEED = HELD_OUT_SEED + 1


def zero_level(model: Any, level: int) -> RemovableHandle:
    """Replace the output of a deepstack level by zeros, until the returned handle is removed."""

    def zero(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    merger: torch.nn.Module = model.model.visual.deepstack_merger_list[level]
    return merger.register_forward_hook(zero)


def swap_positions(model: Any) -> RemovableHandle:
    """Swap the row and column components of the decoder's positions, int64 (3, prompts, length),
    until the returned handle is removed."""

    def swap(module: torch.nn.Module, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, positions = inputs
        return x, positions[[0, 2, 1]]

    rotary: torch.nn.Module = model.model.language_model.rotary_emb
    return rotary.register_forward_pre_hook(swap)


def exact(reader: Reader, groups: Sequence[Questions]) -> float:
    """Return the share of exact answers, from 0 to 1."""
    flags = []
    for group in groups:
        answers = reader(group.pictures, group.prompt)
        flags += [a == expected for a, expected in zip(answers, group.expected, strict=True)]
    return fraction_true(flags)


def swap_pictures(reader: Reader, groups: Sequence[Questions]) -> dict[str, float]:
    """Ask the same question about two pictures before and after swapping them.

    Returns the share of answers that changed, and the share of pairs for which both answers are
    exact. Pairs of equal pictures are skipped.
    """
    changed, both_exact = [], []
    for group in groups:
        before = reader(group.pictures, group.prompt)
        after = reader(group.pictures[::-1], group.prompt)
        texts = [pictures.texts() for pictures in group.pictures]
        for old, new, expected, one, two in zip(before, after, group.expected, *texts, strict=True):
            if one != two:
                changed.append(old != new)
                both_exact.append(old == expected and new == (two if expected == one else one))
    return {"changed": fraction_true(changed), "both_exact": fraction_true(both_exact)}


def ablate(reader: Reader, device: str, count: int) -> dict[str, Any]:
    """Measure all ablations on `count` single pictures and `count` pairs, where `count` is a
    multiple of 25. Return the report as a dict for JSON."""
    renderer = Renderer(SEED, device)
    groups = list(held_out(renderer, count))
    pairs = list(held_out_pairs(renderer, count))
    report: dict[str, Any] = {"pictures": count, "unaltered": exact(reader, groups)}
    for level in range(len(reader.model.model.visual.deepstack_merger_list)):
        with zero_level(reader.model, level):
            report[f"deepstack_level_{level}_zeroed"] = exact(reader, groups)
    with swap_positions(reader.model):
        report["rows_and_columns_swapped"] = exact(reader, groups)
    report["two_pictures"] = exact(reader, pairs)
    report["two_pictures_swapped"] = swap_pictures(reader, pairs)
    return report


def main() -> None:
    """Load a checkpoint, measure all ablations, and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    report = ablate(Reader(args.checkpoint, args.device), args.device, args.count)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
