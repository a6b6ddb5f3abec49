"""The message that reports changes of the prefix index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(42)
class IndexEvents:
    """Block manager to frontend, and to readers of `AsyncLLM.index_events`: changes of the prefix
    index since the previous message. Applied in order, the messages yield the index."""

    cleared: bool
    """True if everything published before is void."""
    forgotten: NDArray[np.uint8]
    """Hashes of full blocks that were removed from the index, (n, 16)."""
    remembered: NDArray[np.uint8]
    """Hashes of full blocks that were added to the index, (n, 16)."""
