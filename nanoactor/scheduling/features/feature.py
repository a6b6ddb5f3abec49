"""Base class of features, the parts of the scheduler that only some requests need."""

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
"""Handler methods of a feature, by event class. Each returns the sequences that end, with
reasons."""


class Feature:
    """Base class of all features: images, grammars, held sequences, forking and pooling.

    A feature owns its state. The scheduler calls the hooks of every feature; a hook does nothing
    unless the feature overrides it.
    """

    HANDLERS: ClassVar[Handlers] = {}
    """Handlers of the events that only this feature processes."""

    @property
    def is_waiting(self) -> bool:
        """True if progress depends on a message from another actor or from a caller."""
        return False

    def arrive(self, sequences: list[Sequence]) -> None:
        """Process the sequences of a newly arrived request."""

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Process a sequence that is assigned a slot. `turn` is the number of the turn (message to
        the block manager) that assigns it. The sequence is `MATCHING` (its prefix-cache lookup is
        outstanding) or starts as a copy of another sequence."""

    def answer(self, event: Answer, admitted: list[Sequence | None]) -> None:
        """Process an answer from the block manager. `admitted` has one entry per uid in
        `event.uids`: the sequence if it starts running now, or None if it has lost its slot or was
        already running."""

    def plan_encoding(self, prefilling: Iterable[Sequence]) -> EncodeSlices | None:
        """Return the slices of images that the next step encodes, or None. Called before the
        step's rows are chosen. `prefilling` lists the sequences with positions left to prefill, by
        priority, and is not empty."""
        return None

    def plan_rows(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return additional rows for step `step`. `rows` are the step's rows that compute prompt
        positions or other known tokens. Called only if `rows` is not empty or some running sequence
        takes no part in decode batches."""
        return []

    def note_done(self, step: int) -> None:
        """Process the completion of step `step`."""

    def forced(self) -> list[tuple[Sequence, Int32]]:
        """Return (sequence, forced tokens) pairs. The scheduler appends the tokens without sampling
        them."""
        return []

    def note_token(self, sequence: Sequence) -> None:
        """Process the newest token of a sequence that continues after it. Called for every token
        sampled outside decode batches. Called for a decoded token only if its id may end a sequence
        or its free text."""

    def note_refused(self, sequences: list[Sequence]) -> None:
        """Process sequences whose end-of-sequence token was rejected because they must not end
        yet."""

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Process rows outside the decode batch that yielded tokens, after the tokens were
        appended."""

    def take_results(self, results: Results, step: int) -> Iterable[Ending]:
        """Process the results of step `step`. Return the sequences that end with these results, and
        why."""
        return ()

    def sequence_to_yield(self) -> Sequence | None:
        """Return a sequence whose slot can be released for a waiting sequence, or None. Called only
        while no step is in flight."""
        return None

    def leave(self, sequence: Sequence) -> None:
        """Process a sequence whose slot is about to be released."""

    def close(self, sequence: Sequence) -> None:
        """Release what the feature holds for a sequence that has ended."""

    def flush(self, turn: TurnBuilder) -> list[Outgoing]:
        """Return the messages to other actors, and add to `turn` (the next message to the block
        manager) the masks or pixels that the runners may drop."""
        return []

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if the feature still holds a resource. Called while no request is
        live."""

    def figures(self) -> dict[str, int]:
        """Return the feature's counters and gauges, by metric name."""
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

    def __init__(self) -> None:
        self._every: list[Feature] = []
        self.by_event: dict[type, Feature] = {}
        """The feature that handles each class of event."""
        self.frequent: dict[str, list[Callable[..., Any]]] = {hook: [] for hook in _FREQUENT}
        """Bound methods by hook name, for hooks that are called on most events. Only methods that
        override the default are listed: in a decode-only step, calling the empty defaults would
        take longer than everything else."""

    def add(self, *features: Feature) -> None:
        """Add features after those added before."""
        self._every += features
        self.by_event |= {kind: feature for feature in features for kind in feature.HANDLERS}
        for hook in _FREQUENT:
            default = getattr(Feature, hook)
            overriding = [f for f in features if getattr(type(f), hook) is not default]
            self.frequent[hook] += [getattr(feature, hook) for feature in overriding]

    def __iter__(self) -> Iterator[Feature]:
        """Iterate over the features in the order in which their hooks are called."""
        return iter(self._every)
