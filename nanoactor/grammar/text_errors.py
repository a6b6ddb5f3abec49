"""Shortens texts of requests for error messages."""

from __future__ import annotations


def shorten(text: str, limit: int = 200) -> str:
    """Return the text, or its start and an ellipsis if it has more than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
