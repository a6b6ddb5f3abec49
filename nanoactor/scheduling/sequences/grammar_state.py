"""The state of a sequence with a grammar: in free text, or under the grammar."""

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
    """The state of one sequence's grammar, which `Constraints` updates."""

    free: FreeText | None
    """The free text before the grammar; None if the grammar applies from the start."""
    gate: int
    """Id of the token that ends the current free text; `NO_GATE` while the grammar applies."""
    pending: list[int]
    """Tokens to send to the grammar when it is opened or starts to apply."""
    run: Int32 | None = None
    """Forced tokens, which become known once all positions before them are planned."""
    last_sampled: int = -1
    """The last position for which a planned step samples under a mask."""
    due_step: int = 0
    """The first step that could have used the next mask; 0 if there was none yet."""

    @classmethod
    def restore(cls, free: FreeText | None, output: Iterable[int]) -> GrammarState:
        """Return the state after the output so far."""
        gate, pending = replay_free_text(free, output)
        return cls(free, gate, pending)

    @property
    def applies(self) -> bool:
        """Return True if the next token is sampled under a mask."""
        return self.gate == NO_GATE

    @property
    def must_continue(self) -> bool:
        """Return True if an end-of-sequence token may not end the sequence here."""
        return must_continue(self.free, self.gate)

    @property
    def watched_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that may change the gate."""
        return watched_ids(self.free)

    @property
    def last_gate(self) -> int:
        """Id of the token after which the grammar applies; `NO_GATE` if there is none."""
        return last_gate(self.free)

    def gate_after(self, index: int, token: int) -> int:
        """Return the gate after the newest token, which is at `index` in the output."""
        return NO_GATE if self.free is None else next_gate(self.free, self.gate, index, token)
