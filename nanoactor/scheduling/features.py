"""What kinds of requests add to the scheduler: pictures, grammars, several answers, held ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from nanoactor.messages import Answer
from nanoactor.scheduling.edges import Send
from nanoactor.scheduling.ends import End
from nanoactor.scheduling.planned import PlannedRow
from nanoactor.scheduling.sequence import Sequence
from nanoactor.scheduling.turns import TurnBuilder
from nanoactor.vision.messages import EncodeSlices

Ending = tuple[Sequence, End]
Handlers = Mapping[type, Callable[[Any, Any], Iterable[Ending]]]
"""By class of event: a method of a feature."""


class Feature:
    """One kind of request's part in scheduling, with its own state. The hooks stand in the order in
    which they are called; each does nothing unless a feature overrides it."""

    HANDLERS: ClassVar[Handlers] = {}
    """The events that are the feature's; each method returns what it ends."""

    @property
    def waits(self) -> bool:
        """Tell whether something that sequences need is under way to a rank."""
        return False

    def arrive(self, answers: list[Sequence]) -> None:
        """The answers of one request arrive."""

    def admit(self, sequence: Sequence, turn: int) -> None:
        """A sequence gets a slot in a turn; it is `MATCHING`, unless it begins as a copy."""

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """The block manager answers; `admitted` are those of its `uids` that it lets run now."""

    def encode(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return what the step at hand encodes, before its rows are chosen; `prefilling` have
        positions left to prefill, by priority."""
        return None

    def choose(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return rows for the step at hand beside these, which compute positions."""
        return []

    def note_done(self, step: int) -> None:
        """A step is done."""

    def leave(self, sequence: Sequence) -> None:
        """A sequence gives up its slot."""

    def close(self, sequence: Sequence) -> None:
        """A sequence is over."""

    def flush(self, turn: TurnBuilder) -> list[Send]:
        """Return what to send behind a turn; add to that what the runners may forget."""
        return []

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anything is held although no request lives."""

    def figures(self) -> dict[str, int]:
        """Return what was counted since the start, and what is held now."""
        return {}
