"""Names of the scheduler's outgoing edges, after the actors that receive from them."""

from __future__ import annotations

from typing import Any

BLOCKS, DETOKENIZER, GRAMMAR = "blocks", "detokenizer", "grammar"
VISION = "vision.{}"
"""Format string of the edge to a vision worker; takes the worker's index."""
Outgoing = tuple[str, Any]
"""Edge name, and the message to send on that edge."""
