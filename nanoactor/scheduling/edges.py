"""Names of the scheduler's outgoing edges (connections to other actors). Each edge is named after
its receiver."""

from __future__ import annotations

from typing import Any

BLOCKS, DETOKENIZER, GRAMMAR = "blocks", "detokenizer", "grammar"
VISION = "vision.{}"
"""Format string of the edge to a vision worker; takes the worker's index."""
Outgoing = tuple[str, Any]
"""Edge name, and the message to send on that edge."""
