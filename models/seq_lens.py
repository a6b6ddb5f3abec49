"""Sequence lengths known to the host, for devices whose operators read lengths from host memory.
Imports no torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class HostSeqLens:
    """Lengths, in tokens, of the sequences of a step's rows. Prefill rows come first, then decode
    rows."""

    prefill_tokens: list[int]
    """Number of tokens of each prompt chunk."""
    prefill_contexts: list[int]
    """Length of each chunk's sequence, including the chunk."""
    decode_contexts: list[int]
    """Length of each decode row's sequence, including its new token."""

    def padded_to(self, rows: int) -> HostSeqLens:
        """Return the lengths with decode rows of length 1 appended, up to `rows` decode rows.
        `NO_SEQ_LENS` is returned unchanged."""
        missing = rows - len(self.decode_contexts)
        if not missing or self is NO_SEQ_LENS:
            return self
        contexts = self.decode_contexts + [1] * missing
        return HostSeqLens(self.prefill_tokens, self.prefill_contexts, contexts)


NO_SEQ_LENS = HostSeqLens([], [], [])
"""Placeholder for devices that do not need lengths on the host."""
