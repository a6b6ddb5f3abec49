"""Log-probabilities of the tokens of an answer's texts, found among those of all its tokens."""

from __future__ import annotations

from typing import Any

Entry = dict[str, Any]


class TokenScores:
    """Assignment of each token of an output to the piece of text in which it starts.

    Tokens arrive in order, as do pieces: reasoning, texts and calls. Marks between them, such as
    `</think>`, belong to no piece.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        """Of the tokens from the first that a further piece may contain."""
        self._entries: list[tuple[int, Entry]] = []
        """Those tokens, each with the place of its first byte."""

    def push(self, entries: list[Entry]) -> None:
        """Add a chat's entries for further tokens: `token`, `logprob`, `bytes`, `top_logprobs`."""
        for entry in entries:
            self._entries.append((len(self._bytes), entry))
            self._bytes += bytes(entry["bytes"] or ())

    def take(self, text: str) -> list[Entry]:
        """Return the tokens that start in this piece; none if the piece does not consist of tokens'
        bytes, for instance if half a character was replaced."""
        if not self._entries:
            return []
        sought = text.encode(errors="replace")
        first = self._bytes.find(sought)
        if first < 0:  # what is here now belongs to no later piece
            self._entries.clear()
            self._bytes.clear()
            return []
        last = first + len(sought)
        found = [entry for at, entry in self._entries if first <= at < last]
        self._entries = [(at - last, entry) for at, entry in self._entries if at >= last]
        del self._bytes[:last]
        return found
