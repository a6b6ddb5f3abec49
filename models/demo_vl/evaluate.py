"""Evaluation of a checkpoint: how well it reads held-out pictures when transformers runs it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from nanoactor.models.demo_vl.layout import (
    END_OF_TEXT,
    HELD_OUT_SEED,
    IMAGE,
    MAX_DIGITS,
    PAIR,
    READ,
    TURN_END,
    Model,
)
from nanoactor.models.demo_vl.network import run_model
from nanoactor.models.demo_vl.prompts import encode_prompt, lay_out, make_batch
from nanoactor.models.demo_vl.render import Pictures, Renderer


def decode_answers(ids: torch.Tensor) -> list[str]:
    """Return the text of generated ids, (rows, size), up to the end of each answer.

    `?` replaces tokens that are not ASCII characters. `…` is appended to an answer that does not
    end.
    """
    answers = []
    for row in ids.tolist():
        end = next((i for i, token in enumerate(row) if token in (TURN_END, END_OF_TEXT)), None)
        answers.append("".join(chr(t) if t < 128 else "?" for t in row[:end]))
        if end is None:
            answers[-1] += "…"
    return answers


@torch.no_grad()
def read_greedily(model: Model, pictures: Sequence[Pictures], prompt: Sequence[int]) -> list[str]:
    """Return greedy answers that are computed with the training code's forward pass."""
    count, device = len(pictures[0].digits), pictures[0].digits.device
    answers = torch.empty(count, 0, dtype=torch.int64, device=device)
    chosen = torch.zeros(count, dtype=torch.int64, device=device)
    for _ in range(MAX_DIGITS + 1):
        logits, _ = run_model(model, make_batch(pictures, [prompt], chosen, answers))
        answers = torch.cat((answers, logits[:, -1:].argmax(-1)), dim=1)
    return decode_answers(answers)


class Reader:
    """A checkpoint that transformers runs in float32 to answer questions about pictures."""

    def __init__(self, directory: Path, device: str) -> None:
        torch.backends.cudnn.allow_tf32 = False
        processor: Any = Qwen2VLImageProcessorPil
        self._processor = processor.from_pretrained(directory)
        model: Model = Qwen3VLForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        )
        self.model = model.to(device).eval()

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Pictures], prompt: Sequence[int]) -> list[str]:
        """Return one greedy answer per row. `pictures[i]` contains the pictures for the prompt's
        placeholder i, one per row."""
        device = self.model.device
        images = [i for row in zip(*(p.images() for p in pictures), strict=True) for i in row]
        inputs = self._processor(images, return_tensors="pt").to(device)
        row = lay_out(prompt, [p.size for p in pictures]).ids
        ids = torch.tensor([row] * len(pictures[0].digits), device=device)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            max_new_tokens=MAX_DIGITS + 1,
            do_sample=False,
        )
        return decode_answers(output[:, ids.shape[1] :])


@dataclasses.dataclass(frozen=True, slots=True)
class Questions:
    """Pictures, a question about them, and the correct answers, one per row."""

    pictures: list[Pictures]
    prompt: tuple[int, ...]
    expected: list[str]


def held_out(
    renderer: Renderer,
    count: int,
    *,
    max_digits: int = MAX_DIGITS,
    plain: bool = False,
    chat: bool = False,
) -> Iterator[Questions]:
    """Yield groups of 25 questions about one picture each, with pictures of equal size in a group.
    `count`, the total number of questions, is a multiple of 25."""
    for _ in range(count // 25):
        pictures = renderer.draw(25, max_digits, plain=plain)
        yield Questions([pictures], encode_prompt(1, READ[0], chat), pictures.texts())


def held_out_pairs(renderer: Renderer, count: int, chat: bool = False) -> Iterator[Questions]:
    """Yield groups of 25 questions about two pictures each. The groups ask alternately about the
    first and about the second picture. `count`, the total number of questions, is a multiple of
    25."""
    for index in range(count // 25):
        pictures = [renderer.draw(25, MAX_DIGITS, plain=False) for _ in PAIR]
        asked_index = index % 2
        expected = pictures[asked_index].texts()
        yield Questions(pictures, encode_prompt(2, PAIR[asked_index], chat), expected)


def fraction_true(flags: Sequence[bool]) -> float:
    """Return the share of True values, from 0 to 1, rounded to four decimal places."""
    return round(sum(flags) / max(len(flags), 1), 4)


def evaluate(reader: Reader, device: str) -> dict[str, Any]:
    """Measure how a checkpoint reads held-out pictures, and return the report as a dict for JSON.

    It contains the shares of answers that are exact when transformers runs the checkpoint, and the
    share of these answers that the training code's forward pass reproduces.
    """
    renderer = Renderer(HELD_OUT_SEED, device)
    same_answers: list[bool] = []

    def ask(groups: Iterator[Questions]) -> list[tuple[int, bool]]:
        """Return, for each question, the length of the expected answer and whether the answer was
        exact."""
        marks = []
        for group in groups:
            answers = reader(group.pictures, group.prompt)
            training_answers = read_greedily(reader.model, group.pictures, group.prompt)
            same_answers.extend(a == b for a, b in zip(answers, training_answers, strict=True))
            pairs = zip(answers, group.expected, strict=True)
            marks += [(len(expected), answer == expected) for answer, expected in pairs]
        return marks

    marks = ask(held_out(renderer, 500))
    sets = {
        "one_white_digit": ask(held_out(renderer, 100, max_digits=1, plain=True)),
        "white_digits_in_cells": ask(held_out(renderer, 100, plain=True)),
        "chat": ask(held_out(renderer, 100, chat=True)),
        "two_pictures": ask(held_out_pairs(renderer, 200)),
        "two_pictures_chat": ask(held_out_pairs(renderer, 100, chat=True)),
    }
    return {
        "exact": fraction_true([exact for _, exact in marks]),
        "pictures": len(marks),
        "exact_by_digits": {
            size: fraction_true([exact for n, exact in marks if n == size])
            for size in range(1, MAX_DIGITS + 1)
        },
        **{
            name: fraction_true([exact for _, exact in set_marks])
            for name, set_marks in sets.items()
        },
        "same_answers_as_in_training": fraction_true(same_answers),
    }


def describe(device: str) -> str:
    """Return a description of the training device for the report: the GPU's name, or the CPU's
    number of threads and architecture."""
    if device == "cpu":
        return f"{torch.get_num_threads()} threads, {platform.machine()}"
    return torch.cuda.get_device_name(device)
