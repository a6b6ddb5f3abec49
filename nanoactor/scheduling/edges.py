"""The scheduler's outgoing edges, named after the actors that receive from them."""

from __future__ import annotations

from typing import Any

BLOCKS, DETOKENIZER, GRAMMAR = "blocks", "detokenizer", "grammar"
VISION = "vision.{}"
"""Name of the edge to a vision worker, to be formatted with the worker's index."""
Outgoing = tuple[str, Any]
"""An edge and the message to send on it."""
