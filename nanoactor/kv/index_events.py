"""The message about changes of the prefix index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(42)
class IndexEvents:
    """Block manager to frontend, and to readers of `AsyncLLM.index_events`: what has changed in the
    prefix index since the message before. A pure difference: in this order they make the index."""

    cleared: bool
    """True if everything published before is void."""
    forgotten: NDArray[np.uint8]
    """Hashes of full blocks that were removed from the index, (n, 16)."""
    remembered: NDArray[np.uint8]
    """Hashes of full blocks that were added to the index, (n, 16)."""
