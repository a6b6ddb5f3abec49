"""The scheduler's edges, by the names of those at their other ends."""

from __future__ import annotations

from typing import Any

BLOCKS, TEXT, GRAMMAR = "blocks", "detokenizer", "grammar"
VISION = "vision.{}"
"""Of a worker, by its number."""
Send = tuple[str, Any]
"""An edge and the message to send on it."""
