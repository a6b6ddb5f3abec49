"""Position of each token in its text, needed for the log-probabilities of an echoed prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoactor.text.decoding import DecoderFactory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Spans = tuple[bytes, list[int]]
"""Bytes of the prompt's first token, and the index in the text of each token's first character."""


class SpanFinder:
    """Finds the position of each token in a text. If a token starts inside a character, its
    position is that of the character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders = DecoderFactory(tokenizer)

    def of_ids(self, token_ids: Sequence[int]) -> Spans:
        """Return the positions of token ids in the text that they decode to, special tokens
        included. There must be at least one id."""
        return self._decoders.piece(token_ids[0]), self._decode_with_starts(token_ids)[1]

    def of_text(self, text: str) -> Spans:
        """Return the positions of a text's tokens. If the tokens decode to a different text,
        because the tokenizer normalizes it or adds a token, use the offsets that the tokenizer
        reports."""
        # Imported here because the user's process imports this module.
        from nanoactor.text.tokenizer import as_request_errors

        with as_request_errors("the prompt cannot be tokenized"):
            encoded = self._tokenizer.encode(text)
        decoded, starts = self._decode_with_starts(encoded.ids)
        if decoded != text:
            starts, end = [], 0
            for begin, stop in encoded.offsets:
                # Some tokenizers exclude the space before a word from its span.
                starts.append(end if text[end:begin].isspace() else begin)
                end = max(end, stop)
        return self._decoders.piece(encoded.ids[0]) if encoded.ids else b"", starts

    def _decode_with_starts(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        decoder, pieces, starts, offset = self._decoders.new(skip_special=False), [], [], 0
        for token in token_ids:
            starts.append(offset)
            pieces.append(decoder.push(token))
            offset += len(pieces[-1])
        return "".join([*pieces, decoder.finish()]), starts
