"""Shortening of text from requests for error messages."""

from __future__ import annotations


def shorten(text: str, limit: int = 200) -> str:
    """Return the text; if it has more than `limit` characters, cut it to `limit` characters that
    end with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
