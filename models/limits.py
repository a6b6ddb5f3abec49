"""Numbers that the torch code and its callers without torch share."""

from __future__ import annotations

# Rows with a top-k up to this are cut from this many candidates, whatever the other rows need:
# the order of equal logits then depends on the row alone, not on its batch.
CANDIDATES = 256

NO_TOKEN = -1
"""Result for a row with non-finite logits, ..."""
NOTHING_ALLOWED = -2
"""Result for a row with finite logits if the request's own rules leave no id."""
FROZEN = -3
"""Result for a decode row of a slot that was already frozen."""
FREEZE_IDS = 8
"""How many token ids can freeze a slot."""
