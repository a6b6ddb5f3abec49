"""Constants shared by the torch code and by callers that do not import torch."""

from __future__ import annotations

# Number of candidates that are sorted for a row with a top-k of at most this number. It is the same
# for all such rows, so that the order of equal logits depends only on the row, not on its batch.
CANDIDATES = 256

NO_TOKEN = -1
"""Result for a row whose highest logit is NaN or infinite."""
NOTHING_ALLOWED = -2
"""Result for a row with finite logits if its request's own rules exclude every token id."""
FROZEN = -3
"""Result for a decode row of a slot that was already frozen."""
MAX_FREEZE_IDS = 8
"""Maximum number of token ids that can freeze a slot."""
