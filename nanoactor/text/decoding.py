"""Token ids to text, one token at a time, so that the pieces add up to the whole.

The concatenation of all pieces equals decoding all ids at once. For byte-level tokenizers (Qwen's,
GPT's) each id represents a few bytes, and an incremental UTF-8 decoder does the rest in constant
time; for others a window of tokens is decoded again and compared.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the user's process imports this module, and has no use for the library
    from tokenizers import Tokenizer


class IncrementalDecoder(Protocol):
    """The decoding state of one request."""

    plain: Mapping[int, str]
    """Text of tokens that does not depend on their neighbors. It may be used instead of `push`
    while nothing is `holding`."""
    holding: bool
    """True if the text of some pushed tokens is not certain yet."""

    def push(self, token: int) -> str:
        """Return the text that this token makes certain; perhaps none yet."""

    def finish(self) -> str:
        """Return the remaining text, at the end of the output."""


class DecoderFactory:
    """Chooses how to decode, once for a tokenizer, and keeps the tables."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._table = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None
        self._plain = _plain_texts(self._table or {})
        self._plain_unless_special = self._plain | dict.fromkeys(self._special, "")
        vocabulary = tokenizer.get_vocab()
        self._fallback = frozenset(i for t, i in vocabulary.items() if _is_byte_fallback(t))
        ordinary = (i for t, i in vocabulary.items() if t.isascii() and t.isalpha())
        self._anchor = min(ordinary, default=0)
        """A token before which nothing changes."""
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes of one token by itself; those of a special one are its name's."""
        if self._table is not None:
            return self._table.get(token, b"")
        if token not in self._pieces:
            self._pieces[token] = self._find_piece(token)
        return self._pieces[token]

    def _find_piece(self, token: int) -> bytes:
        if token in self._fallback:
            name = self._tokenizer.id_to_token(token) or ""
            return bytes.fromhex(name[3:5])
        # As within a text: at the start decoders may remove its space.
        around = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        text = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)
        return text[len(around) :].encode()

    def new(self, skip_special: bool) -> IncrementalDecoder:
        """A decoder for one request."""
        skipped = self._special if skip_special else frozenset[int]()
        if self._table is not None:
            plain = self._plain_unless_special if skip_special else self._plain
            return _ByteLevelDecoder(self._table, skipped, plain)
        return _WindowDecoder(self._tokenizer, skipped, self._fallback)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return decoder.get("type") == "ByteLevel"


def _is_byte_fallback(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def byte_alphabet() -> dict[str, int]:
    """Return the printable characters by which byte-level tokenizers write the 256 bytes.

    Printable Latin-1 characters represent themselves, the others are mapped from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    alphabet = byte_alphabet()

    def as_bytes(token: str) -> bytes:
        # A token with any other character, such as an added one, is plain text.
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {index: as_bytes(token) for token, index in vocabulary.items()}


def _plain_texts(table: dict[int, bytes]) -> dict[int, str]:
    """Return the texts of tokens with bytes that form whole characters."""
    plain = {}
    for token, data in table.items():
        with contextlib.suppress(UnicodeDecodeError):
            plain[token] = data.decode()
    return plain


class _ByteLevelDecoder:
    """Bytes from a table, characters from an incremental decoder. Unknown ids are skipped."""

    def __init__(
        self, table: dict[int, bytes], skipped: frozenset[int], plain: dict[int, str]
    ) -> None:
        self.plain: Mapping[int, str] = plain
        self.holding = False
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the characters that are complete with this token."""
        if token in self._skipped:
            return ""
        text = self._utf8.decode(self._table.get(token, b""))
        self.holding = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """Return a replacement character for incomplete bytes."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes a window of tokens with and without the new ones; emits the difference.

    The window starts at tokens with text already emitted, since decoders treat the first token of a
    sequence differently. Nothing is emitted while the last token may still change: when it ends
    inside a character, or belongs to a run of byte tokens.
    """

    plain: Mapping[int, str] = types.MappingProxyType({})  # a token's text depends on the others
    holding = True

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], byte_tokens: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._window: list[int] = []
        self._emitted = 0
        """Leading tokens of the window with emitted text."""

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def push(self, token: int) -> str:
        """Add a token; return the text that is now final."""
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
        before = self._decode(self._window[: self._emitted]) if self._emitted else ""
        # Byte tokens stay together with the run that gives them their meaning.
        keep = max(1, len(self._window) - self._emitted)
        self._window = self._window[-keep:]
        self._emitted = len(self._window)
        return text[len(before) :]

    def finish(self) -> str:
        """Return all remaining text."""
        return self._emit(self._decode(self._window)) if self._window else ""
