"""The state of a sequence's grammar: whether free text or the grammar currently applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nanoactor.messages.engine import FreeText, Int32
from nanoactor.scheduling.sequences.free_text import (
    NO_GATE,
    last_gate,
    must_continue,
    next_gate,
    replay_free_text,
    watched_ids,
)


@dataclasses.dataclass(slots=True)
class GrammarState:
    """The state of one sequence's grammar, created on arrival and updated by `Constraints`."""

    free: FreeText | None
    """The free text before the grammar; None if the grammar applies from the start."""
    gate: int
    """Id of the token that ends the current free text; `NO_GATE` while the grammar applies."""
    pending: list[int]
    """Tokens to send to the grammar when it is opened or starts to apply."""
    run: Int32 | None = None
    """Forced tokens, to be appended once all positions before them are planned; None if there are
    none."""
    last_sampled: int = -1
    """Last position that a planned step samples under a mask; -1 if there is none."""
    due_step: int = 0
    """First step in which the next mask could have been used; 0 if no such step was planned yet."""

    @classmethod
    def restore(cls, free: FreeText | None, output: Iterable[int]) -> GrammarState:
        """Return the state after the tokens of `output`, which is empty unless the sequence
        resumes."""
        gate, pending = replay_free_text(free, output)
        return cls(free, gate, pending)

    @property
    def applies(self) -> bool:
        """True if the grammar applies, so that the next token is sampled under a mask."""
        return self.gate == NO_GATE

    @property
    def must_continue(self) -> bool:
        """True if an end-of-sequence token must not end the sequence now."""
        return must_continue(self.free, self.gate)

    @property
    def watched_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that may change the gate, the token that ends the current free text."""
        return watched_ids(self.free)

    @property
    def last_gate(self) -> int:
        """Id of the token after which the grammar applies; `NO_GATE` if there is none."""
        return last_gate(self.free)

    def gate_after(self, index: int, token: int) -> int:
        """Return the gate (the id of the token that ends the current free text) after the newest
        token, `token`, at `index` in the output."""
        return NO_GATE if self.free is None else next_gate(self.free, self.gate, index, token)
