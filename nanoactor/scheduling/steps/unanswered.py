"""Turns that the block manager has not answered, and step results that must wait for the
answers."""

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
    """An admission that the block manager has not answered yet."""

    turn: int
    sequence: Sequence
    step: int = 0
    """Number of the step in the same turn if it contains the sequence's first row; else 0."""


class UnansweredTurns:
    """Tracks turns that the block manager has not answered, and holds back results that must wait
    for the answers. A *turn* is the message with all scheduler decisions that follow from one
    event.

    A step's results are held back while a turn with a failure is unanswered, because the failure
    may affect other sequences. They are also held back while there is an unanswered admission whose
    first row is in that step or an earlier one.
    """

    def __init__(self) -> None:
        self._answered = 0
        """Number of the last turn that the block manager has answered."""
        self._admissions: deque[PendingAdmission] = deque()
        """Unanswered admissions, oldest first."""
        self._last_failure_turn = 0
        """Number of the latest turn with a failure. No results are processed until it is
        answered."""
        self.held_back: deque[StepDone] = deque()

    def note_admission(self, turn: int, sequence: Sequence) -> None:
        """Record an admission. `turn` is the number of the turn (message to the block manager) that
        contains it."""
        self._admissions.append(PendingAdmission(turn, sequence))

    def note_first_rows(self, turn: int, step: int, uids: set[int]) -> None:
        """Record which of the sequences that the turn (message to the block manager) with the
        number `turn` admits have their first row in step `step`. `uids` are the uids of all
        sequences with rows in that step."""
        for entry in self._admissions:
            if entry.turn == turn and entry.sequence.uid in uids:
                entry.step = step

    def note_failure(self, turn: int) -> None:
        """Record that the turn (message to the block manager) with the number `turn` reports a
        failure."""
        self._last_failure_turn = turn

    def note_answer(self, turn: int) -> None:
        """Record that the block manager has answered all turns (messages to it) up to number
        `turn`."""
        self._answered = turn

    def pop(self, uid: int) -> PendingAdmission:
        """Remove and return the oldest unanswered admission. Raises `ProtocolBug` unless it belongs
        to `uid`."""
        entry = self._admissions.popleft()
        if entry.sequence.uid != uid:
            raise ProtocolBug(
                f"expected the answer for {entry.sequence.describe()}, but got the one for "
                f"sequence {uid}"
            )
        return entry

    def hold_back(self, event: StepDone) -> bool:
        """If a step's results must wait for an answer, store a copy of them and return True."""
        if not self.held_back and not self._must_wait(event):
            return False
        self.held_back.append(copy_arrays(event))  # the copy outlives the handler
        return True

    def release(self) -> Iterator[StepDone]:
        """Yield the held-back results that can be processed now, in step order. The caller must
        process each one before it requests the next."""
        while self.held_back and not self._must_wait(self.held_back[0]):
            yield self.held_back.popleft()

    def _must_wait(self, event: StepDone) -> bool:
        if self._last_failure_turn > self._answered:
            return True
        admissions = self._admissions  # usually empty
        return bool(admissions) and any(0 < entry.step <= event.step for entry in admissions)
