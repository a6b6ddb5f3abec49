"""Constants shared by code that uses torch and code that must not import it."""

from __future__ import annotations

# Number of candidates that are sorted for each row whose top-k is at most this number. It is the
# same for all such rows, so that the order of equal logits depends only on the row, not on its
# batch.
CANDIDATES = 256

NO_TOKEN = -1
"""Sampling result of a row whose highest logit is NaN or infinite."""
NOTHING_ALLOWED = -2
"""Sampling result of a row with finite logits whose request allows no token id."""
FROZEN = -3
"""Result of a decode row that samples nothing, because its sequence has already sampled a token
that stops decoding on the device."""
MAX_FREEZE_IDS = 8
"""Maximum number of token ids per sequence after which the device stops decoding it, without
waiting for the host."""
