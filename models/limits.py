"""Constants shared by the torch code and by callers that do not import torch."""

from __future__ import annotations

# A row with a top-k of at most this is truncated from this many candidates, whatever other rows
# need: the order of equal logits then depends only on the row, not on its batch.
CANDIDATES = 256

NO_TOKEN = -1
"""Result for a row whose highest logit is NaN or infinite."""
NOTHING_ALLOWED = -2
"""Result for a row with finite logits if its request's own rules exclude every token id."""
FROZEN = -3
"""Result for a decode row of a slot that was already frozen."""
FREEZE_IDS = 8
"""Maximum number of token ids that can freeze a slot."""
