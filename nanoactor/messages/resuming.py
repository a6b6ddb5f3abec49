"""Messages for resuming sequences after a process has died and all processes were restarted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(9)
class ToldTokens:
    """The output tokens of a sequence that were already emitted to the user."""

    token_ids: NDArray[np.int32]


@message(16)
class Resume:
    """Frontend to scheduler, as the first message after a restart: the sequences that continue."""

    below: int
    """Sequences with uids below this number are finished, except those in `living`."""
    living: NDArray[np.int64]
    """Uids below `below` whose requests will be submitted again."""
