"""Messages for resuming sequences after a process has died and all processes have restarted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(9)
class ToldTokens:
    """The tokens of a sequence that were emitted to the user."""

    token_ids: NDArray[np.int32]


@message(16)
class Resume:
    """Frontend to scheduler, as the first message after a restart: the requests that continue."""

    below: int
    """Requests with uids below this number are dropped, except those in `living`."""
    living: NDArray[np.int64]
    """Uids below `below` that will be submitted again."""
