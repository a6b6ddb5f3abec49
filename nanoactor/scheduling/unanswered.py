"""What the block manager has yet to answer, and the results that wait for it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from nanoactor.errors import ProtocolBug
from nanoactor.messages import StepDone
from nanoactor.runtime.codec import copied
from nanoactor.scheduling.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Admitted:
    """An admission that is not answered."""

    turn: int
    sequence: Sequence
    step: int = 0
    """The step of the same turn, if that has its first row; else 0."""


class Unanswered:
    """Knows which turns are not answered. Results wait for the block manager where it is to say
    what a failure has spoilt, or what an admission has found whose first row is among them."""

    def __init__(self) -> None:
        self._answered = 0
        """The last turn that the block manager has answered."""
        self._admitted: deque[Admitted] = deque()
        """In order."""
        self._doubted = 0
        """The turn with the latest failure: until it is answered no results are reported."""
        self.held_back: deque[StepDone] = deque()

    def admit(self, turn: int, sequence: Sequence) -> None:
        """A sequence is admitted in a turn."""
        self._admitted.append(Admitted(turn, sequence))

    def ride(self, turn: int, step: int, uids: set[int]) -> None:
        """Of those admitted in a turn, these have their first row in its step."""
        for entry in self._admitted:
            if entry.turn == turn and entry.sequence.uid in uids:
                entry.step = step

    def doubt(self, turn: int) -> None:
        """A turn tells of a failure."""
        self._doubted = turn

    def note_answer(self, turn: int) -> None:
        """All turns up to one are answered."""
        self._answered = turn

    def pop(self, uid: int) -> Admitted:
        """Return the oldest admission, which is answered. Raises `ProtocolBug` if it is another's
        than the answer says."""
        entry = self._admitted.popleft()
        if entry.sequence.uid != uid:
            raise ProtocolBug(f"request {uid} is answered, due was {entry.sequence.describe()}")
        return entry

    def hold_back(self, event: StepDone) -> bool:
        """Keep results that must wait; return whether they must."""
        if not self.held_back and not self._must_wait(event):
            return False
        self.held_back.append(copied(event))  # it outlives its handler
        return True

    def release(self) -> Iterator[StepDone]:
        """Go through the results that need not wait any more, each after what the one before it has
        led to."""
        while self.held_back and not self._must_wait(self.held_back[0]):
            yield self.held_back.popleft()

    def _must_wait(self, event: StepDone) -> bool:
        if self._doubted > self._answered:
            return True
        return any(0 < entry.step <= event.step for entry in self._admitted)
