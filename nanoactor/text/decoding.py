"""Incremental decoding of token ids to text.

The returned pieces of text, concatenated, equal the text of all ids decoded at once. For byte-level
tokenizers (Qwen's, GPT's), each id stands for a few bytes, and an incremental UTF-8 decoder
converts them in constant time. For other tokenizers, each new token is decoded together with the
tokens before it, and the text that is already known is removed.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # not needed in the user's process, which imports this module
    from tokenizers import Tokenizer


class IncrementalDecoder(Protocol):
    """Decoder of one request's output that keeps its state between tokens."""

    standalone_texts: Mapping[int, str]
    """Texts of the tokens that decode independently of their neighbors, by token id. While
    `has_pending_text` is False, a caller may use such a text instead of calling `push`."""
    has_pending_text: bool
    """True if some pushed tokens are not fully decoded yet, such as the first bytes of a
    character."""

    def push(self, token: int) -> str:
        """Append a token. Return the text that became final, which may be empty."""

    def finish(self) -> str:
        """Return the remaining text. Call this after the last token."""


class DecoderFactory:
    """Creates a decoder for each request, with tables that all decoders of a tokenizer share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._table = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None
        self._standalone_texts = _find_standalone_texts(self._table or {})
        self._plain_unless_special = self._standalone_texts | dict.fromkeys(self._special, "")
        vocabulary = tokenizer.get_vocab()
        self._fallback = frozenset(i for t, i in vocabulary.items() if _is_byte_fallback(t))
        ordinary = (i for t, i in vocabulary.items() if t.isascii() and t.isalpha())
        self._anchor = min(ordinary, default=0)
        """An ordinary token that is decoded before another one, so that the other one does not
        start the text."""
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """Return the bytes of a single token. For a special token, these are the bytes of its name;
        for an unknown id, there are none."""
        if self._table is not None:
            return self._table.get(token, b"")
        if token not in self._pieces:
            self._pieces[token] = self._find_piece(token)
        return self._pieces[token]

    def _find_piece(self, token: int) -> bytes:
        if token in self._fallback:
            name = self._tokenizer.id_to_token(token) or ""
            return bytes.fromhex(name[3:5])
        # Decode after an ordinary token: decoders may remove a leading space at the start of a
        # text.
        anchor_text = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        text = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)
        return text[len(anchor_text) :].encode()

    def new(self, skip_special: bool) -> IncrementalDecoder:
        """Create the decoder of one request. `skip_special` omits special tokens from the text."""
        skipped = self._special if skip_special else frozenset[int]()
        if self._table is not None:
            standalone_texts = (
                self._plain_unless_special if skip_special else self._standalone_texts
            )
            return _ByteLevelDecoder(self._table, skipped, standalone_texts)
        return _WindowDecoder(self._tokenizer, skipped, self._fallback)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return decoder.get("type") == "ByteLevel"


def _is_byte_fallback(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def byte_alphabet() -> dict[str, int]:
    """Return the 256 characters of byte-level tokenizers, each mapped to the byte that it
    represents.

    Printable Latin-1 characters represent themselves. The other bytes are represented by characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    alphabet = byte_alphabet()

    def as_bytes(token: str) -> bytes:
        # A token with any other character is plain text, such as an added token.
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {index: as_bytes(token) for token, index in vocabulary.items()}


def _find_standalone_texts(table: dict[int, bytes]) -> dict[int, str]:
    """Return the texts of all tokens whose bytes are complete UTF-8 characters, by token id."""
    standalone_texts = {}
    for token, data in table.items():
        with contextlib.suppress(UnicodeDecodeError):
            standalone_texts[token] = data.decode()
    return standalone_texts


class _ByteLevelDecoder:
    """Decoder for byte-level tokenizers: a table converts tokens to bytes, and an incremental UTF-8
    decoder converts bytes to text. Unknown ids are skipped."""

    def __init__(
        self, table: dict[int, bytes], skipped: frozenset[int], standalone_texts: dict[int, str]
    ) -> None:
        self.standalone_texts: Mapping[int, str] = standalone_texts
        self.has_pending_text = False
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Append a token. Return the characters that it completes."""
        if token in self._skipped:
            return ""
        text = self._utf8.decode(self._table.get(token, b""))
        self.has_pending_text = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """Return a replacement character (U+FFFD) if an incomplete character remains."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for other tokenizers: decodes a window of recent tokens with and without the new
    token, and returns the difference.

    The window starts with tokens whose text has already been returned, because the first token of a
    sequence is decoded differently. Nothing is returned while the text may still change, that is,
    while it ends inside a character or in a run of byte tokens.
    """

    standalone_texts: Mapping[int, str] = types.MappingProxyType(
        {}
    )  # a token's text depends on the others
    has_pending_text = True

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], byte_tokens: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._window: list[int] = []
        self._emitted_tokens = 0
        """Number of tokens at the start of the window whose text has already been returned."""

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def push(self, token: int) -> str:
        """Append a token. Return the text that became final, which may be empty."""
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._window.append(token)
        if token in self._byte_tokens:
            return ""
        text = self._decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        before = self._decode(self._window[: self._emitted_tokens]) if self._emitted_tokens else ""
        # Keep a run of byte tokens together, because only the whole run can be decoded.
        keep = max(1, len(self._window) - self._emitted_tokens)
        self._window = self._window[-keep:]
        self._emitted_tokens = len(self._window)
        return text[len(before) :]

    def finish(self) -> str:
        """Return all remaining text."""
        return self._emit(self._decode(self._window)) if self._window else ""
