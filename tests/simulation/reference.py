"""What each request must get, computed one by one, without batches, blocks or messages."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from nanoactor.kv.hashing import block_hashes
from tests.simulation.scenario import VOCABULARY, Ask, Scenario

SALT = b"0123456789abcdef"
_MASK = (1 << 62) - 1


def extend(state: int, token: int) -> int:
    """The state of a context after one more token: what a KV position holds."""
    return ((state + token + 1) * 6364136223846793005 + (state >> 29)) & _MASK


def sample(state: int) -> int:
    """The token that follows a context."""
    return (state >> 17) % VOCABULARY


def letter(token: int) -> str:
    """A token's text."""
    return "abcde"[token % 5]


class Letters:
    """A decoder in which every eleventh token's text is held back until the next token."""

    plain: ClassVar[dict[int, str]] = {t: letter(t) for t in range(VOCABULARY) if t % 11}

    def __init__(self) -> None:
        self._held = ""

    @property
    def holding(self) -> bool:
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


class LetterDecoders:
    """Stands where a `DecoderFactory` does."""

    def new(self, skip_special: bool) -> Letters:
        """A decoder for one request."""
        return Letters()


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of one request, and where and why they end."""

    tokens: tuple[int, ...]
    """Prompt, output, and some of what would have followed."""
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


def answer(ask: Ask, scenario: Scenario) -> Answer | None:
    """What a request must get; None where it must be refused."""
    prompt, limit = ask.prompt, scenario.max_model_len
    if len(prompt) >= limit or not all(0 <= token < VOCABULARY for token in prompt):
        return None
    tokens, states = list(prompt), []
    state = 0
    for token in prompt:
        state = extend(state, token)
        states.append(state)
    for _ in range(min(ask.max_tokens, limit - len(prompt)) + scenario.depth + 2):
        tokens.append(sample(state))
        state = extend(state, tokens[-1])
        states.append(state)
    output, reason, stop_reason = _cut_by_ids(ask, tokens[len(prompt) :], limit - len(prompt))
    length = len(prompt) + len(output)
    kept, text, stop = cut_by_text(ask, output, hide_last=reason == "stop")
    if stop is not None:
        reason, stop_reason = "stop", stop
    return Answer(
        tuple(tokens),
        np.array(states, np.int64),
        length,
        len(prompt),
        len(prompt) + min(ask.max_tokens, limit - len(prompt)),
        tuple(kept),
        text,
        reason,
        stop_reason,
    )


def _cut_by_ids(ask: Ask, output: list[int], room: int) -> tuple[list[int], str, int | None]:
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
            for index, row in enumerate(block_hashes(tokens, block_size, SALT)):
                states = one.states[index * block_size : (index + 1) * block_size]
                found[bytes(row)] = TrueBlock(parent, states)
                parent = bytes(row)
    return found
