"""Features: the parts of the scheduler that only some requests need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from nanoactor.messages.engine import Answer, Int32
from nanoactor.messages.vision import EncodeSlices
from nanoactor.scheduling.edges import Outgoing
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.planned import PlannedRow
from nanoactor.scheduling.steps.results import Results
from nanoactor.scheduling.steps.turns import TurnBuilder

Ending = tuple[Sequence, End]
Handlers = Mapping[type, Callable[[Any, Any], Iterable[Ending]]]
"""Methods of a feature that handle events, by event class."""


class Feature:
    """Base class of all features: pictures, grammars, held sequences, forking and pooling.

    A feature owns its state. The scheduler calls the hooks of every feature; a hook does nothing
    unless the feature overrides it.
    """

    HANDLERS: ClassVar[Handlers] = {}
    """Handlers of the feature's own events. Each returns the sequences that end, and why."""

    @property
    def is_waiting(self) -> bool:
        """Return True if progress depends on a message from another actor or a caller."""
        return False

    def arrive(self, sequences: list[Sequence]) -> None:
        """Process the sequences of a new request."""

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Process a sequence that gets a slot in this turn. It is `MATCHING`, or starts as a
        copy."""

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """Process an answer from the block manager. `admitted` has an entry for each of the
        answer's `uids`: the sequence if it starts running now, or None if it has since given up its
        slot or is already running."""

    def plan_encoding(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices that the next step encodes, before its rows are chosen. `prefilling`
        lists the sequences with positions left to prefill, by priority, and is not empty."""
        return None

    def plan_rows(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return additional rows for this step. `rows` are the rows that compute positions. Called
        if there are such rows, or if any running sequence never decodes."""
        return []

    def note_done(self, step: int) -> None:
        """Process the completion of a step."""

    def forced(self) -> list[tuple[Sequence, Int32]]:
        """Return (sequence, forced tokens that follow) pairs. The tokens are known from now on."""
        return []

    def note_token(self, sequence: Sequence) -> None:
        """Process a sequence that does not end with its newest token. Called at least for watched
        ids and for tokens sampled by rows that do not decode."""

    def note_refused(self, sequences: list[Sequence]) -> None:
        """Process sequences that refused an end-of-sequence token because they must continue."""

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Process rows that do not decode, after their sampled tokens were handled."""

    def take_results(self, results: Results, step: int) -> Iterable[Ending]:
        """Process the results of a step's rows; return the sequences that end with them, and
        why."""
        return ()

    def sequence_to_yield(self) -> Sequence | None:
        """Return a sequence that can give up its slot to a waiting one, or None. No step is in
        flight when this is called."""
        return None

    def leave(self, sequence: Sequence) -> None:
        """Process a sequence that is about to give up its slot."""

    def close(self, sequence: Sequence) -> None:
        """Process the end of a sequence."""

    def flush(self, turn: TurnBuilder) -> list[Outgoing]:
        """Return the messages to send after this turn, and add to the turn the masks or pixels that
        the runners may drop."""
        return []

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if a resource is held although no request is left."""

    def figures(self) -> dict[str, int]:
        """Return the feature's counters and gauges."""
        return {}


_FREQUENT = (
    "flush",
    "forced",
    "note_token",
    "note_done",
    "note_refused",
    "note_results",
    "take_results",
    "sequence_to_yield",
)


class Features:
    """All features of a scheduler, in the order in which their hooks are called."""

    def __init__(self, *features: Feature) -> None:
        self._every = features
        self.by_event = {kind: feature for feature in features for kind in feature.HANDLERS}
        """The feature that handles each class of event."""
        self.frequent: dict[str, list[Callable[..., Any]]] = {}
        """Overriding methods of each hook that is called for most events. In a step that only
        decodes, calling the hooks that do nothing would cost more than everything else."""
        for hook in _FREQUENT:
            default = getattr(Feature, hook)
            overriding = [f for f in features if getattr(type(f), hook) is not default]
            self.frequent[hook] = [getattr(feature, hook) for feature in overriding]

    def __iter__(self) -> Iterator[Feature]:
        """Iterate over the features."""
        return iter(self._every)
