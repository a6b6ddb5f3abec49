"""Answers that change between free text and text under a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanoactor.scheduling.constraints import Constraints
from nanoactor.scheduling.free_text import NO_GATE
from nanoactor.scheduling.sequence import Sequence


class Turning:
    """Has sequences come back as what they have become."""

    def __init__(self, constraints: Constraints, send_back: Callable[[Sequence], None]) -> None:
        """`send_back` has a sequence give up all that it holds, and wait."""
        self._constraints, self._send_back = constraints, send_back

    def look(self, sequence: Sequence) -> None:
        """A sequence has a new token: one kind of free text may follow another, or the grammar
        begin to hold, or cease to."""
        gate, before = sequence.gate_reached, sequence.gate
        if gate == before:
            return
        token = int(sequence.tokens[-1])
        if NO_GATE in (gate, before):
            self._leave(sequence)
        if gate == NO_GATE:
            self._constraints.begin(sequence, [token])
        elif before == NO_GATE:
            self._constraints.pause(sequence.uid, token)
        sequence.gate = gate

    def refuse(self, sequences: Iterable[Sequence]) -> None:
        """These would have ended in their thoughts: their grammars end these."""
        for sequence in sequences:
            self._leave(sequence)
            self._constraints.begin(sequence, [])
            sequence.gate = NO_GATE

    def _leave(self, sequence: Sequence) -> None:
        """Steps in flight compute what it does not go on with; what is known it computes again, as
        far as that is not cached."""
        if sequence.slot >= 0:
            self._send_back(sequence)
        sequence.drops = True
