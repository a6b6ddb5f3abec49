"""Features: the parts of the scheduler that only some requests need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from nanoactor.messages.engine import Answer, Int32
from nanoactor.messages.vision import EncodeSlices
from nanoactor.scheduling.edges import Send
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.planned import PlannedRow
from nanoactor.scheduling.steps.results import Results
from nanoactor.scheduling.steps.turns import TurnBuilder

Ending = tuple[Sequence, End]
Handlers = Mapping[type, Callable[[Any, Any], Iterable[Ending]]]
"""By class of event: a method of a feature."""


class Feature:
    """The base of all features: pictures, grammars, held sequences, copies.

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
        """Handle an answer from the block manager. `admitted` has an entry for each of its `uids`:
        the sequence that starts to run, or None if it has since given up its slot or is already
        running."""

    def encode(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices that the next step encodes, before its rows are chosen. `prefilling`
        are the sequences with positions left to prefill, by priority; there are some."""
        return None

    def choose(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return more rows for this step. `rows` are the rows that compute positions. Called if
        there are any, or any sequence never decodes."""
        return []

    def note_done(self, step: int) -> None:
        """Note that a step is done."""

    def forced(self) -> list[tuple[Sequence, Int32]]:
        """Return sequences with the forced tokens that follow. They are known from now on."""
        return []

    def go_on(self, sequence: Sequence) -> None:
        """Note that a sequence does not end with its newest token, which is one of its watched ids
        or was sampled by a row that does not decode."""

    def note_refused(self, sequences: list[Sequence]) -> None:
        """Note that the newest tokens of these would have ended them, but they must continue."""

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Note that these rows, which do not decode, have brought their tokens."""

    def take_results(self, results: Results, step: int) -> Iterable[Ending]:
        """Take the results of a step's rows; return the sequences that end with them, and how."""
        return ()

    def yielding(self) -> Sequence | None:
        """Return a sequence that can give up its slot to a waiting one; nothing is in flight."""
        return None

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


_FREQUENT = (
    "flush",
    "forced",
    "go_on",
    "note_done",
    "note_refused",
    "note_results",
    "take_results",
    "yielding",
)


class Features:
    """All features of a scheduler, in the order in which their hooks are called."""

    def __init__(self, *features: Feature) -> None:
        self._every = features
        self.owners = {kind: feature for feature in features for kind in feature.HANDLERS}
        """By class of event: the feature that handles it."""
        self.frequent: dict[str, list[Callable[..., Any]]] = {}
        """By hook that is called for most events: the methods that override it. Calling those that
        do nothing would cost a step that only decodes more than all else in it."""
        for hook in _FREQUENT:
            default = getattr(Feature, hook)
            overriding = [f for f in features if getattr(type(f), hook) is not default]
            self.frequent[hook] = [getattr(feature, hook) for feature in overriding]

    def __iter__(self) -> Iterator[Feature]:
        """Iterate over the features."""
        return iter(self._every)
