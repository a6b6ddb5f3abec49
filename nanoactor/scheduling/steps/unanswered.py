"""Turns that the block manager has not answered, and the results that wait for an answer."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import StepDone
from nanoactor.runtime.codec import copied
from nanoactor.scheduling.sequences.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Admitted:
    """An unanswered admission."""

    turn: int
    sequence: Sequence
    step: int = 0
    """The step of the same turn, if that has its first row; else 0."""


class Unanswered:
    """Tracks unanswered turns.

    Results wait for the answer to a turn with a failure, which may taint other sequences, and for
    the answer to an admission whose first row is among them.
    """

    def __init__(self) -> None:
        self._answered = 0
        """The last turn that the block manager has answered."""
        self._admitted: deque[Admitted] = deque()
        """In order."""
        self._doubted = 0
        """The turn with the latest failure: no results are reported until it is answered."""
        self.held_back: deque[StepDone] = deque()

    def admit(self, turn: int, sequence: Sequence) -> None:
        """Record an admission."""
        self._admitted.append(Admitted(turn, sequence))

    def ride(self, turn: int, step: int, uids: set[int]) -> None:
        """Record that these sequences, admitted in this turn, have their first row in its step."""
        for entry in self._admitted:
            if entry.turn == turn and entry.sequence.uid in uids:
                entry.step = step

    def doubt(self, turn: int) -> None:
        """Record that a turn reports a failure."""
        self._doubted = turn

    def note_answer(self, turn: int) -> None:
        """Record that all turns up to this one are answered."""
        self._answered = turn

    def pop(self, uid: int) -> Admitted:
        """Remove and return the oldest admission. Raises `ProtocolBug` if it is not this
        sequence's."""
        entry = self._admitted.popleft()
        if entry.sequence.uid != uid:
            raise ProtocolBug(f"request {uid} is answered, but due was {entry.sequence.describe()}")
        return entry

    def hold_back(self, event: StepDone) -> bool:
        """Keep a copy of results that must wait; return True if they must."""
        if not self.held_back and not self._must_wait(event):
            return False
        self.held_back.append(copied(event))  # it outlives its handler
        return True

    def release(self) -> Iterator[StepDone]:
        """Yield results that need not wait any longer. Each is checked after the one before it was
        processed."""
        while self.held_back and not self._must_wait(self.held_back[0]):
            yield self.held_back.popleft()

    def _must_wait(self, event: StepDone) -> bool:
        if self._doubted > self._answered:
            return True
        riding = self._admitted  # most of the time there is none
        return bool(riding) and any(0 < entry.step <= event.step for entry in riding)
