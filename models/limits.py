"""Numbers that the torch code and its callers without torch share."""

from __future__ import annotations

# Rows whose top-k is at most this are cut from so many candidates, whatever the others want:
# how equal logits are ordered then depends on the row alone, not on its batch.
CANDIDATES = 256

NO_TOKEN = -1
"""Chosen where a row's logits are not finite, ..."""
NOTHING_ALLOWED = -2
"""... and where they are, but the request's own rules leave no id."""
FROZEN = -3
"""Stands for the token of a decode row whose slot was frozen before."""
FREEZE_IDS = 8
"""How many token ids can freeze a slot."""
