"""Turns that the block manager has not answered, and the results that wait for an answer."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import StepDone
from nanoactor.runtime.codec import copy_arrays
from nanoactor.scheduling.sequences.sequence import Sequence


@dataclasses.dataclass(slots=True)
class PendingAdmission:
    """An admission that the block manager has not answered."""

    turn: int
    sequence: Sequence
    step: int = 0
    """Step of the same turn if it contains the sequence's first row; else 0."""


class UnansweredTurns:
    """Tracks unanswered turns.

    The results of a step are held back while a turn with a failure is unanswered, because the
    failure may taint other sequences. They are also held back while an admission whose first row is
    in that step or an earlier one is unanswered.
    """

    def __init__(self) -> None:
        self._answered = 0
        """The last turn that the block manager has answered."""
        self._admissions: deque[PendingAdmission] = deque()
        """Unanswered admissions, in order."""
        self._last_failure_turn = 0
        """The latest turn with a failure: no results are processed until it is answered."""
        self.held_back: deque[StepDone] = deque()

    def note_admission(self, turn: int, sequence: Sequence) -> None:
        """Record an admission that was sent to the block manager."""
        self._admissions.append(PendingAdmission(turn, sequence))

    def note_first_rows(self, turn: int, step: int, uids: set[int]) -> None:
        """Record which sequences admitted in turn `turn` have their first row in step `step`, given
        the `uids` of the step's rows."""
        for entry in self._admissions:
            if entry.turn == turn and entry.sequence.uid in uids:
                entry.step = step

    def note_failure(self, turn: int) -> None:
        """Record that a turn reports a failure."""
        self._last_failure_turn = turn

    def note_answer(self, turn: int) -> None:
        """Record that all turns up to this one are answered."""
        self._answered = turn

    def pop(self, uid: int) -> PendingAdmission:
        """Remove and return the oldest admission. Raises `ProtocolBug` unless it is that of
        `uid`."""
        entry = self._admissions.popleft()
        if entry.sequence.uid != uid:
            raise ProtocolBug(f"request {uid} was answered instead of {entry.sequence.describe()}")
        return entry

    def hold_back(self, event: StepDone) -> bool:
        """Store a copy of a step's results if they must wait; return True if they must."""
        if not self.held_back and not self._must_wait(event):
            return False
        self.held_back.append(copy_arrays(event))  # the copy outlives the handler
        return True

    def release(self) -> Iterator[StepDone]:
        """Yield the results that need not wait any longer. Each is checked after the previous one
        was processed."""
        while self.held_back and not self._must_wait(self.held_back[0]):
            yield self.held_back.popleft()

    def _must_wait(self, event: StepDone) -> bool:
        if self._last_failure_turn > self._answered:
            return True
        admissions = self._admissions  # usually empty
        return bool(admissions) and any(0 < entry.step <= event.step for entry in admissions)
