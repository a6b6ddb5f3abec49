"""The scheduler's edges, named after the actors at their other ends."""

from __future__ import annotations

from typing import Any

BLOCKS, TEXT, GRAMMAR = "blocks", "detokenizer", "grammar"
VISION = "vision.{}"
"""The edge to a vision worker, by its number."""
Send = tuple[str, Any]
"""An edge and the message to send on it."""
