"""Parts of messages that carry pooled vectors from the device to the user."""

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
    """Results of a step's pooling rows."""

    rows: Int32
    """Indices of the rows, ascending; see `nanoactor.messages.rows.StepRows`."""
    values: Float32
    """(rows, width): the state of one position of each row, or logits computed from it; for mean
    pooling, the sum of the row's states."""


@message(54)
class RequestVectors:
    """Pooled results that are complete."""

    uids: Int64
    values: Float32
    """Pooled vectors, (sequences, width)."""

    @classmethod
    def of(cls, pooled: Sequence[tuple[int, Float32]]) -> RequestVectors | None:
        """Return a message with these (uid, vector) pairs; None if there are none."""
        if not pooled:
            return None
        uids, values = zip(*pooled, strict=True)
        return cls(np.array(uids, np.int64), np.stack(values))
