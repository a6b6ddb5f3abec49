"""Tokenization of prompts about pictures, and their layout in batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jinja2
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoactor.models.demo_vl.layout import (
    CELL,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IGNORED,
    IMAGE,
    NO_DIGIT,
    PAIR,
    READ,
    SPECIAL_TOKENS,
    TURN_END,
)
from nanoactor.models.demo_vl.render import Pictures, Renderer


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the training curriculum."""

    name: str
    max_digits: int
    """Maximum number of digits in a picture."""
    plain: float
    """Share of batches whose pictures have white digits on black, each in a cell of 32 x 32
    pixels."""
    until: float
    """Share of the total training time at which the phase ends at the latest."""
    pass_loss: float
    """Mean loss per answer token below which the phase ends early."""
    pairs: float = 0.0
    """Share of batches in which the prompts have two pictures."""
    chats: float = 0.0
    """Share of batches in which the prompts are formatted with the chat template."""


def make_tokenizer() -> Tokenizer:
    """Create a tokenizer that has one token per byte, with the byte's value as its id, and the
    special tokens."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    vocabulary = {character: byte for byte, character in characters.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


@functools.cache
def encode_prompt(pictures: int, question: str, chat: bool) -> tuple[int, ...]:
    """Return the token ids of a prompt that has one placeholder for each of `pictures` pictures,
    followed by the question. If `chat` is True, it is formatted with the chat template."""
    if chat:
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        template = jinja2.Template(CHAT_TEMPLATE)
        text = template.render(messages=messages, add_generation_prompt=True)
    else:
        text = "<|vision_start|><|image_pad|><|vision_end|>" * pictures + question
    return tuple(make_tokenizer().encode(text).ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A prompt in which each picture has one token per square of 2 x 2 patches."""

    ids: list[int]
    spans: list[slice]
    """Range of token indices of each picture."""
    sizes: list[tuple[int, int]]
    """(height, width) of each picture in tokens."""

    def positions(self, length: int) -> torch.Tensor:
        """Return the positions in time, row and column of the first `length` tokens, int64 (3,
        length). Tokens after the prompt have positions as text tokens do."""
        positions = torch.empty(3, length, dtype=torch.int64)
        index = position = 0
        for span, (rows, columns) in zip(self.spans, self.sizes, strict=True):
            positions[:, index : span.start] = torch.arange(position, position + span.start - index)
            position += span.start - index
            positions[0, span] = position
            positions[1, span] = position + torch.arange(rows).repeat_interleave(columns)
            positions[2, span] = position + torch.arange(columns).repeat(rows)
            position, index = position + max(rows, columns), span.stop
        positions[:, index:] = torch.arange(position, position + length - index)
        return positions


def lay_out(prompt: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Layout:
    """Expand the placeholders in a prompt. `sizes` contains (height, width) in pixels of each
    picture."""
    grids = [(height // CELL, width // CELL) for height, width in sizes]
    ids: list[int] = []
    spans: list[slice] = []
    for token in prompt:
        count = math.prod(grids[len(spans)]) if token == IMAGE else 1
        if token == IMAGE:
            spans.append(slice(len(ids), len(ids) + count))
        ids += [token] * count
    return Layout(ids, spans, grids)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Training inputs: prompts with answers, padded to equal length. The prompts have the same
    layout up to the last picture."""

    pictures: Sequence[Pictures]
    """For each placeholder, the pictures of all prompts."""
    spans: Sequence[slice]
    positions: torch.Tensor
    """Positions in time, row and column, int64 (3, length); the same for all prompts."""
    ids: torch.Tensor
    """Token ids of prompts and answers, int64 (prompts, length)."""
    targets: torch.Tensor
    """Token ids of the answers at their positions, `IGNORED` elsewhere, int64 (prompts, length)."""


def make_batch(
    pictures: Sequence[Pictures],
    prompts: Sequence[Sequence[int]],
    chosen: torch.Tensor,
    answers: torch.Tensor,
) -> Batch:
    """Return a batch in which each row is one of `prompts` followed by an answer, with padding on
    the right. The prompts must be equal up to the last picture.

    `chosen` is the index of each row's prompt, int64 (rows,). `answers` contains token ids, int64
    (rows, size), padded with `IGNORED`.
    """
    device, count = answers.device, len(answers)
    layouts = [lay_out(prompt, [p.size for p in pictures]) for prompt in prompts]
    length = max(len(layout.ids) for layout in layouts) + answers.shape[1]
    ids = torch.full((len(layouts), count, length), END_OF_TEXT, device=device)
    targets = torch.full_like(ids, IGNORED)
    for index, layout in enumerate(layouts):
        start, stop = len(layout.ids), len(layout.ids) + answers.shape[1]
        ids[index, :, :start] = torch.tensor(layout.ids, device=device)
        ids[index, :, start:stop] = answers.where(answers != IGNORED, END_OF_TEXT)
        targets[index, :, start:stop] = answers
    rows = torch.arange(count, device=device)
    positions = layouts[0].positions(length).to(device)
    return Batch(pictures, layouts[0].spans, positions, ids[chosen, rows], targets[chosen, rows])


def answer_ids(digits: torch.Tensor) -> torch.Tensor:
    """Return the token ids, int64 (rows, 4), of `digits`, int64 (rows, 3), with an end-of-turn
    token after the last digit of each row. Unused entries are `IGNORED`."""
    end = (digits != NO_DIGIT).sum(1, keepdim=True)
    ids = torch.cat((digits + ord("0"), torch.zeros_like(end)), dim=1)
    column = torch.arange(ids.shape[1], device=digits.device)
    return ids.where(column < end, IGNORED).where(column != end, TURN_END)


def sample_batch(renderer: Renderer, phase: Phase, count: int) -> Batch:
    """Draw a random batch of `count` prompts for a phase. All of them have one picture, or all have
    two."""
    has_pair = renderer.chance() < phase.pairs
    is_chat = renderer.chance() < phase.chats
    is_stripped = is_chat and renderer.chance() < 0.5
    plain = renderer.chance() < phase.plain
    pictures = [renderer.draw(count, phase.max_digits, plain=plain) for _ in range(1 + has_pair)]
    questions = [q.strip() if is_stripped else q for q in (PAIR if has_pair else READ)]
    prompts = [encode_prompt(len(pictures), question, is_chat) for question in questions]
    device = pictures[0].digits.device
    rows = torch.arange(count, device=device)
    chosen = rows % len(pictures)
    digits = torch.stack([p.digits for p in pictures])[chosen, rows]
    return make_batch(pictures, prompts, chosen, answer_ids(digits))
