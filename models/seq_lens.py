"""Lengths that the host knows, for devices whose operators take them from there; imports no
torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class HostSeqLens:
    """A step's rows in their order: prefill rows, then decode rows."""

    prefill_tokens: list[int]
    """Number of tokens of each prompt chunk."""
    prefill_contexts: list[int]
    """Length of each chunk's sequence at the end of the chunk."""
    decode_contexts: list[int]
    """Length of each decode row's sequence, the new token included."""

    def padded(self, rows: int) -> HostSeqLens:
        """With so many decode rows; those of the dummy have a context of one position."""
        missing = rows - len(self.decode_contexts)
        if not missing or self is NO_SEQ_LENS:
            return self
        contexts = self.decode_contexts + [1] * missing
        return HostSeqLens(self.prefill_tokens, self.prefill_contexts, contexts)


NO_SEQ_LENS = HostSeqLens([], [], [])
"""Where the device does not ask."""
