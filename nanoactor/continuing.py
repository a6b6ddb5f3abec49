"""Messages about answers that go on after a process has died and everybody began anew."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(9)
class ToldTokens:
    """The tokens that an answer's user was told."""

    token_ids: NDArray[np.int32]


@message(16)
class Resume:
    """Frontend to scheduler, first of all after everybody began anew: who lives."""

    below: int
    """Requests with uids below this number are dropped, except those in `living`."""
    living: NDArray[np.int64]
    """Uids below `below` that will be submitted again."""
