"""Structures for pooled vectors in messages, from the device to the user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@message(36)
class StepVectors:
    """The vectors that a step computes for pooling rows, the rows of requests that return a pooled
    vector instead of tokens."""

    rows: Int32
    """Indices of the pooling rows among all rows of the step (`nanoactor.messages.rows.StepRows`),
    ascending."""
    values: Float32
    """(rows, width), float32: for each row, the hidden state of one position, or logits computed
    from that state. For mean pooling, the sum of the hidden states of the row's positions."""


@message(54)
class RequestVectors:
    """Complete pooled vectors of sequences."""

    uids: Int64
    values: Float32
    """Pooled vectors, (sequences, width), float32."""

    @classmethod
    def of(cls, pooled: Sequence[tuple[int, Float32]]) -> RequestVectors | None:
        """Return the message for these (uid, vector) pairs; None if there are none."""
        if not pooled:
            return None
        uids, values = zip(*pooled, strict=True)
        return cls(np.array(uids, np.int64), np.stack(values))
