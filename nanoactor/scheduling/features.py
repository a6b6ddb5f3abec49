"""Features: the parts of the scheduler that only some requests need."""

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
    """The base of all features: pictures, grammars, held answers, copies.

    A feature owns its state. The scheduler calls the hooks of every feature; a hook does nothing
    unless the feature overrides it.
    """

    HANDLERS: ClassVar[Handlers] = {}
    """The feature's own events. A handler returns the sequences that end, and how."""

    @property
    def waits(self) -> bool:
        """Return True if progress depends on a message from another actor or a caller."""
        return False

    def arrive(self, answers: list[Sequence]) -> None:
        """Take the answers of a new request."""

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Note that a sequence gets a slot in this turn. It is `MATCHING`, or begins as a copy."""

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """Take an answer of the block manager. `admitted` has an entry for each of its `uids`: the
        sequence that starts to run; None if it gave up its slot meanwhile, or runs already."""

    def encode(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices that the next step encodes, before its rows are chosen. `prefilling`
        are the sequences with positions left to prefill, by priority; there are some."""
        return None

    def choose(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return more rows for this step. `rows` are the rows that compute positions. Called where
        there are some, or sequences that never decode."""
        return []

    def note_done(self, step: int) -> None:
        """Note that a step is done."""

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence is about to give up its slot."""

    def close(self, sequence: Sequence) -> None:
        """Note that a sequence is finished."""

    def flush(self, turn: TurnBuilder) -> list[Send]:
        """Return the messages to send after this turn, to which masks or pixels that the runners
        may drop are added."""
        return []

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if a resource is held although no request is left."""

    def figures(self) -> dict[str, int]:
        """Return the feature's counters and gauges."""
        return {}


def overriding(features: Iterable[Feature], hook: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of the features that override it.

    Most steps only decode: a call of each feature that does nothing would cost them more than all
    else that is new since the step before.
    """
    default = getattr(Feature, hook)
    return [getattr(f, hook) for f in features if getattr(type(f), hook) is not default]
