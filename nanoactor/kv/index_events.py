"""The message that reports changes to the prefix index to its readers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message


@message(42)
class IndexEvents:
    """Block manager to frontend, and to readers of `AsyncLLM.index_events`: changes to the prefix
    index since the previous message. Applying all messages in order yields the index."""

    cleared: bool
    """True if readers must clear their copies before applying this message."""
    forgotten: NDArray[np.uint8]
    """Hashes of the full blocks removed from the index, uint8 (n, 16)."""
    remembered: NDArray[np.uint8]
    """Hashes of the full blocks added to the index, uint8 (n, 16)."""
