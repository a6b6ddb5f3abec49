"""The grammar's own actor over a toy, whose masks follow from a number and the tokens so far."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoactor.actors.grammar import GrammarActor
from nanoactor.actors.tokenizer import TokenizerActor
from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.grammar.book import GrammarBook
from nanoactor.messages.engine import FreeText
from nanoactor.messages.grammar import Int32, OpenGrammar
from tests.simulation.reference import ToyState
from tests.simulation.scenario import Toy

if TYPE_CHECKING:
    from nanoactor.setup.actors import ActorConfig
    from tests.simulation.world import World

TOO_HARD = "the toy grammar is too hard"


def text_of(toy: Toy) -> str:
    """A toy as it travels."""
    free = map(int, toy.free or ())
    return " ".join(map(str, [toy.number, toy.fails_at, int(toy.hangs), *free]))


def free_text_of(text: str) -> FreeText | None:
    """What of a toy's answer is free."""
    _, _, _, *free = map(int, text.split())
    return FreeText(bool(free[0]), *free[1:]) if free else None


def mask_of(ids: list[int], words: int) -> Int32:
    """A row with a bit for each of these."""
    bits = np.zeros(32 * words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def is_refused(number: int) -> bool:
    """Whether the machine is to blame where a toy fails, not the toy."""
    return number % 3 == 0


class ToyMatcher:
    """Stands where a `Matcher` does."""

    def __init__(self, number: int, fails_at: int, free: FreeText | None) -> None:
        self._toy = ToyState(number, free and dataclasses.astuple(free))
        self._number, self._left = number, fails_at

    def consume(self, tokens: list[int]) -> None:
        """A token that is not allowed is a bug of ours."""
        for token in tokens:
            assert token in self._toy.allowed, f"token {token} was not allowed"
            self._toy.take(token)
            self._left -= 1

    def fill(self, out: Int32) -> None:
        """Fails where it was told to."""
        if not self._left:
            raise (OutOfResources if is_refused(self._number) else InvalidRequest)(TOO_HARD)
        out[:] = mask_of(self._toy.allowed, len(out))


class _NoThreads:
    """Stands where `CompilerThreads` do."""

    def start_reading(self) -> None:
        """There is no vocabulary."""


class SimulatedGrammar(GrammarActor):
    """`GrammarActor` with a delay in the place of its thread."""

    def __init__(self, config: ActorConfig, world: World) -> None:
        super().__init__(config)
        self._world = world
        self._random = random.Random(f"{world.scenario.seed} compile")
        self._threads: Any = _NoThreads()

    def _on_open(self, event: OpenGrammar) -> None:
        self._book.open(self.context.owned_copy(event))
        number, fails_at, hangs = map(int, event.grammar.split()[:3])
        if hangs:
            return
        scenario = self._world.scenario
        mean = scenario.compile_steps * scenario.step_seconds
        delay = self._random.expovariate(1 / mean) if mean else 0.0
        matcher = ToyMatcher(number, fails_at, free_text_of(event.grammar))
        book = self._book
        self._world.loop.call_later(delay, self._told, book, event.uid, matcher)

    def _told(self, book: GrammarBook, uid: int, matcher: ToyMatcher) -> None:
        """As the thread does, unless everybody began anew."""
        if book is self._book and not self.context.retired:
            self._on_compiled(book, uid, (matcher, 0))


class _ToyFreeText:
    """Stands where a `FreeTextSplitter` does."""

    def split(self, grammar: str) -> tuple[str, FreeText | None]:
        """What of a toy's answer is free; the toy stays as it is."""
        return grammar, free_text_of(grammar) if grammar else None


class SimulatedTokenizer(TokenizerActor):
    """`TokenizerActor` that knows the toys' free text."""

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self._free_text: Any = _ToyFreeText()
