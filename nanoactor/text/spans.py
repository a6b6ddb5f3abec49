"""Finds the position of each token in its text, for the log-probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoactor.text.decoding import DecoderFactory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Spans = tuple[bytes, list[int]]
"""The bytes of a prompt's first token, and the index of each token's first character in the
text."""


class SpanFinder:
    """Finds the position of each token in a text. A token inside a character starts at that
    character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders = DecoderFactory(tokenizer)

    def of_ids(self, token_ids: Sequence[int]) -> Spans:
        """Return the spans of these ids in the text that they decode to, including special
        tokens."""
        return self._decoders.piece(token_ids[0]), self._decode_with_starts(token_ids)[1]

    def of_text(self, text: str) -> Spans:
        """Return the spans of the tokens in this text. The tokens may decode to a different text: a
        normalized one, or one with an additional token at the beginning."""
        # Imported here because the user's process imports this module.
        from nanoactor.text.tokenizer import as_request_errors

        with as_request_errors("the prompt cannot be tokenized"):
            encoded = self._tokenizer.encode(text)
        decoded, starts = self._decode_with_starts(encoded.ids)
        if decoded != text:
            starts, end = [], 0
            for begin, stop in encoded.offsets:
                # Some tokenizers leave the space before a word out of its span.
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
