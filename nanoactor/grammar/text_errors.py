"""Shortening of text from requests for error messages."""

from __future__ import annotations


def shorten(text: str, limit: int = 200) -> str:
    """Return the text. If it is longer than `limit` characters, cut it to that length, including a
    final "..."."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
