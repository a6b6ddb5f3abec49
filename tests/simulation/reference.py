"""What each request must get, computed one by one, without batches, blocks or messages."""

from __future__ import annotations

import dataclasses
import struct
from typing import ClassVar, NamedTuple

import numpy as np

from nanoactor.kv.hashing import block_hashes
from nanoactor.setup.actors import ENCODER_PAGE_ROWS
from tests.simulation.scenario import (
    END,
    IMAGE,
    START,
    VIDEO,
    VOCABULARY,
    Ask,
    Image,
    Scenario,
    encode_text,
    time_text,
)

SALT = b"0123456789abcdef"
_MASK = (1 << 62) - 1


def extend(state: int, token: int) -> int:
    """The state of a context after one more token: what a KV position holds."""
    return ((state + token + 1) * 6364136223846793005 + (state >> 29)) & _MASK


def sample(state: int, answer: int = 0) -> int:
    """The token that follows a context in one of the answers to a request."""
    return ((state >> 17) + 7 * answer) % VOCABULARY


def allowed(state: int) -> list[int]:
    """The ids that a toy grammar allows in a state, which begins as its number and goes on as that
    of a context does: one in two of five states, many in the others."""
    if state % 5 < 2:
        return [state % VOCABULARY]
    found = [token for token in range(VOCABULARY) if state >> token % 37 & 1]
    return found or [state % VOCABULARY]


class ToyState:
    """A toy grammar's way: tags, where free text was before them, then what `allowed` allows."""

    def __init__(self, number: int, free: tuple[bool, int, int, int] | None = None) -> None:
        thinks, self._think, close, call = free or (False, -1, -1, -1)
        self._close = close
        self._state = number
        self._tags: list[int] = [call] if call >= 0 else [close] if thinks else []
        if call >= 0:
            self._think = -1

    @property
    def allowed(self) -> list[int]:
        """The ids that may follow."""
        if self._tags:
            return self._tags[:1]
        found = allowed(self._state)
        return found if self._think < 0 else sorted({*found, self._think, 0, 1})

    def take(self, token: int) -> None:
        """Go on behind a token."""
        think, self._think = self._think, -1
        if self._tags:
            self._tags.pop(0)
        elif think == token:
            self._tags = [self._close]
        else:
            self._state = extend(self._state, token)


class Speech:
    """How an answer with free text goes on, token by token."""

    def __init__(self, ask: Ask, number: int) -> None:
        assert ask.grammar is not None
        self._free = ask.grammar.free
        self._toy = ToyState(ask.grammar.number, self._free)
        self._ask, self._number, self._index = ask, number, 0
        thinks, _, close, call = self._free or (False, -1, -1, -1)
        self._until = close if thinks else call
        """What ends the free text; -1: the grammar holds."""
        self.refused = -1
        """The index of the end-of-sequence token that was not taken."""

    def say(self, state: int) -> tuple[tuple[int, ...], int]:
        """(what the grammar allows, nothing where the text is free; the token)."""
        self._index += 1
        _, think, close, call = self._free or (False, -1, -1, -1)
        thinks = self._free is not None and self._free[0]
        if self._until >= 0:
            token = sample(state, self._number)
            ends = token in self._ask.eos_ids and self._index >= self._ask.min_tokens
            if ends and call < 0:
                self._until, self.refused = -1, self._index - 1
            else:
                if self._index == 1 and not thinks and token == think:
                    self._until = close
                elif token == self._until:
                    self._until = call if token == close else -1
                    if self._until < 0:
                        self._toy.take(token)
                return (), token
        mask = tuple(self._toy.allowed)
        token = sample_allowed(state, list(mask), self._number)
        self._toy.take(token)
        if self._index == 1 and not thinks and token == think:
            self._until = close
        return mask, token


def sample_allowed(state: int, ids: list[int], answer: int = 0) -> int:
    """The token that follows a context where these may."""
    return ids[((state >> 17) + 7 * answer) % len(ids)]


class Scored(NamedTuple):
    """What a device says of a token."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def score(state: int, token: int, count: int) -> Scored:
    """The log-probability of a token behind a context, and so many of the likeliest."""
    value = -((state >> 5) % 4096 + token) / 16
    ids = tuple((state + rank) % VOCABULARY for rank in range(count))
    return Scored(value, state % VOCABULARY + 1, ids, tuple(value + rank for rank in range(count)))


def letter(token: int) -> str:
    """A token's text."""
    return "abcde"[token % 5]


class Letters:
    """A decoder in which every eleventh token's text is held back until the next token."""

    standalone_texts: ClassVar[dict[int, str]] = {t: letter(t) for t in range(VOCABULARY) if t % 11}

    def __init__(self) -> None:
        self._held = ""

    @property
    def has_pending_text(self) -> bool:
        """Whether a text waits for the next token."""
        return bool(self._held)

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        text = self._held + letter(token)
        self._held = text if token % 11 == 0 else ""
        return "" if self._held else text

    def finish(self) -> str:
        """What was held back."""
        return self._held


def vector_of(states: np.ndarray) -> np.ndarray:
    """The sum of what positions bring whose states are pooled; exact in float32."""
    return np.array([(states % prime).sum() for prime in (1009, 997)], np.float32)


def pooled(answer: Answer, kind: str) -> np.ndarray:
    """The vector of a prompt."""
    states = answer.states[: answer.prompt_length]
    parts = {"last": states[-1:], "mean": states, "cls": states[:1]}
    return vector_of(parts[kind]) / np.float32(len(states) if kind == "mean" else 1)


class LetterDecoders:
    """Stands where a `DecoderFactory` does."""

    def piece(self, token: int) -> bytes:
        """A token's bytes."""
        return letter(token).encode()

    def new(self, skip_special: bool) -> Letters:
        """A decoder for one request."""
        return Letters()


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of one request, and where and why they end."""

    tokens: tuple[int, ...]
    """Prompt, output, and some of what would have followed."""
    seen: dict[int, int]
    """By index in the prompt: the row of an image that stands there, as a number."""
    positions: np.ndarray
    """Rotary positions of all tokens, (3, tokens)."""
    extras: dict[int, bytes]
    """What of a block's name is about images."""
    undecodable: bool
    """Whether it has an image that cannot be decoded."""
    states: np.ndarray
    """int64: what the KV cache holds at each of their positions."""
    length: int
    """How many tokens the scheduler lets it have: prompt and output."""
    prompt_length: int
    limit: int
    """How many tokens it may have, if nothing ends it before."""
    output: tuple[int, ...]
    """As the user sees it: cut where a stop string ends."""
    text: str
    reason: str
    stop_reason: int | str | None
    masks: tuple[tuple[int, ...], ...] = ()
    """Of each token of output: what the grammar allows in its place; nothing where it is free."""
    refused: int = -1
    """The position at which an end-of-sequence token was not taken."""

    def is_chosen(self, position: int) -> bool:
        """Whether the token at a position is chosen under a mask."""
        at = position - self.prompt_length
        return 0 <= at < len(self.masks) and bool(self.masks[at])


def answer(
    ask: Ask, scenario: Scenario, number: int = 0, chosen: tuple[int, ...] = ()
) -> Answer | None:
    """What one of a request's answers must be; None where it must be refused. One that is held has
    what its caller has `chosen`, and what would be sampled behind it."""
    limit = scenario.max_model_len
    for placeholder in (IMAGE, VIDEO):
        given = sum(image.placeholder == placeholder for image in ask.images)
        if ask.prompt.count(placeholder) != given:
            return None
    prompt, seen, spans = _expand(ask)
    known = {token for token in ask.prompt if not 0 <= token < VOCABULARY} <= {IMAGE, VIDEO}
    pages = sum(-(-image.rows // ENCODER_PAGE_ROWS) for image in ask.images)
    faults = {image.fault for image in ask.images}
    too_long = len(prompt) + (not ask.pools) > limit
    if too_long or not known or "header" in faults or pages > scenario.encoder_pages:
        return None
    tokens, states = list(prompt), []
    state = 0
    for index, token in enumerate(prompt):
        state = extend(state, seen.get(index, token))
        states.append(state)
    for token in chosen:
        tokens.append(token)
        state = extend(state, token)
        states.append(state)
    masks: list[tuple[int, ...]] = []
    speech = Speech(ask, number) if ask.grammar else None
    for _ in range(min(ask.max_tokens, limit - len(prompt)) + scenario.most_in_flight + 2):
        if speech is not None:
            mask, token = speech.say(state)
            masks.append(mask)
            tokens.append(token)
        else:
            tokens.append(sample(state, number))
        state = extend(state, tokens[-1])
        states.append(state)
    output, reason, stop_reason = _cut_by_ids(ask, tokens[len(prompt) :], limit - len(prompt))
    most = 1 if ask.pools else min(ask.max_tokens, limit - len(prompt))
    length = len(prompt) + len(chosen if ask.caller else output)
    kept, text, stop = cut_by_text(ask, output, hide_last=reason == "stop")
    if stop is not None:
        reason, stop_reason = "stop", stop
    return Answer(
        tuple(tokens),
        seen,
        _rotary(len(tokens), spans),
        _extras(ask, spans, scenario.block_size),
        "pixels" in faults,
        np.array(states, np.int64),
        length,
        len(prompt),
        len(prompt) + most,
        tuple(kept),
        text,
        reason,
        stop_reason,
        tuple(masks),
        len(prompt) + speech.refused if speech is not None and speech.refused >= 0 else -1,
    )


def turns(ask: Ask, scenario: Scenario) -> list[list[Answer | None]]:
    """What each of a request's answers is, before its caller's first turn and behind each; one that
    has ended stays as it was."""
    chosen: list[tuple[int, ...]] = [()] * ask.n
    found = [[answer(ask, scenario, number) for number in range(ask.n)]]
    for turn in ask.caller.rounds if ask.caller else ():
        going = zip(turn.parents, turn.tokens, chosen, strict=True)
        chosen = [(*chosen[p], token) if p >= 0 else own for p, token, own in going]
        found.append([answer(ask, scenario, number, chosen[number]) for number in range(ask.n)])
    return found


def row_of(image: Image, row: int) -> int:
    """What the tower gives for a row of an image."""
    return (image.content << 20 | image.height << 12 | image.width << 4) * 1000 + row + 1000


def _expand(ask: Ask) -> tuple[list[int], dict[int, int], list[tuple[int, Image, int]]]:
    """(tokens, rows by index, (first index, image or frame of a video, its first row))."""
    prompt: list[int] = []
    seen: dict[int, int] = {}
    spans = []
    images = iter(ask.images)
    for token in ask.prompt:
        if token not in (IMAGE, VIDEO):
            prompt.append(token)
            continue
        image = next(images)
        each = image.height * image.width
        for frame in range(max(1, image.frames)):
            if image.frames:
                prompt += [*encode_text(time_text(float(frame))), START]
            first = frame * each
            spans.append((len(prompt), image, first))
            seen |= {len(prompt) + row: row_of(image, first + row) for row in range(each)}
            prompt += [token] * each
            if image.frames:
                prompt.append(END)
    return prompt, seen, spans


def _rotary(length: int, spans: list[tuple[int, Image, int]]) -> np.ndarray:
    positions, index = np.zeros((3, length), np.int32), 0
    at = 0
    images = {start: image for start, image, _ in spans}
    while index < length:
        if (image := images.get(index)) is None:
            positions[:, index] = at
            at, index = at + 1, index + 1
            continue
        each = image.height * image.width
        for row in range(each):
            down, right = divmod(row, image.width)
            positions[:, index + row] = at, at + down, at + right
        at, index = at + max(image.height, image.width), index + each
    return positions


def _extras(ask: Ask, spans: list[tuple[int, Image, int]], size: int) -> dict[int, bytes]:
    extras: dict[int, bytes] = {}
    for start, image, first in spans:
        name = key_of(image) + struct.pack("<III", image.height, image.width, first)
        stop = start + image.height * image.width
        for block in range(start // size, -(-stop // size)):
            extras[block] = extras.get(block, b"") + name
    return extras


def key_of(image: Image) -> bytes:
    """What a vision worker calls it."""
    return struct.pack("<IIII", image.content, image.height, image.width, image.frames)


def _cut_by_ids(ask: Ask, output: list[int], room: int) -> tuple[list[int], str, int | None]:
    if ask.pools:
        return [], "stop", None
    for index, token in enumerate(output):
        count = index + 1
        if count >= ask.min_tokens:
            if token in ask.eos_ids:
                return output[:count], "stop", None
            if token in ask.stop_ids:
                return output[:count], "stop", token
        if count == min(ask.max_tokens, room):
            return output[:count], "length", None
    raise AssertionError("the continuation is too short")


def cut_by_text(ask: Ask, output: list[int], hide_last: bool) -> tuple[list[int], str, str | None]:
    """(output up to the token that completes a stop string, text, stop string)."""
    decoder, text, searched = Letters(), "", 0
    for index, token in enumerate(output):
        hidden = hide_last and index == len(output) - 1
        text += "" if hidden else decoder.push(token)
        if index < ask.min_tokens:
            searched = len(text)
        elif (found := _first_stop(ask, text[searched:])) is not None:
            end, stop = found
            cut = searched + end - (0 if ask.include_stop else len(stop))
            return output[: index + 1], text[:cut], stop
    text += decoder.finish()
    if (found := _first_stop(ask, text[searched:])) is not None:
        end, stop = found
        cut = searched + end - (0 if ask.include_stop else len(stop))
        return output, text[:cut], stop
    return output, text, None


def _first_stop(ask: Ask, text: str) -> tuple[int, str] | None:
    """The stop string that ends first, the longest of those: (where it ends, which)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in ask.stop if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@dataclasses.dataclass(frozen=True)
class TrueBlock:
    """What a content hash stands for."""

    parent: bytes
    states: np.ndarray


def true_blocks(answers: list[Answer | None], block_size: int) -> dict[bytes, TrueBlock]:
    """By content hash: every block that may ever be indexed."""
    found = {}
    for one in answers:
        if one is not None:
            parent = b""
            tokens = np.array(one.tokens[: one.length], np.int32)
            hashes = block_hashes(tokens, block_size, SALT, extras=one.extras)
            for index, row in enumerate(hashes):
                states = one.states[index * block_size : (index + 1) * block_size]
                found[bytes(row)] = TrueBlock(parent, states)
                parent = bytes(row)
    return found
