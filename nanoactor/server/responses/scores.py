"""Log-probabilities of the tokens in an answer's texts, selected from those of all output
tokens."""

from __future__ import annotations

from typing import Any

Entry = dict[str, Any]


class TokenScores:
    """Finds the tokens that belong to each piece of text in an answer.

    Tokens arrive in order, and so do pieces of reasoning, text and calls. A token belongs to the
    piece in which it starts. Tags between pieces, such as `</think>`, belong to no piece.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        """Bytes of all tokens that a later piece may contain."""
        self._entries: list[tuple[int, Entry]] = []
        """Entries of the tokens in `_bytes`, each with the offset of its first byte."""

    def push(self, entries: list[Entry]) -> None:
        """Append the log-probability entries of new tokens, as in a chat: `token`, `logprob`,
        `bytes`, `top_logprobs`."""
        for entry in entries:
            self._entries.append((len(self._bytes), entry))
            self._bytes += bytes(entry["bytes"] or ())

    def pop(self, text: str) -> list[Entry]:
        """Return the entries of the tokens that start in the next piece, `text`. Return an empty
        list if the text does not match the bytes of the tokens, for instance because an incomplete
        character was replaced."""
        if not self._entries:
            return []
        encoded = text.encode(errors="replace")
        first = self._bytes.find(encoded)
        if first < 0:  # these tokens belong to no later piece
            self._entries.clear()
            self._bytes.clear()
            return []
        last = first + len(encoded)
        matching = [entry for at, entry in self._entries if first <= at < last]
        self._entries = [(at - last, entry) for at, entry in self._entries if at >= last]
        del self._bytes[:last]
        return matching
