"""A model's tokenizer, loaded from its files without transformers."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nanoactor.errors import InvalidRequest, OutOfResources
from nanoactor.messages.engine import Int32
from nanoactor.models.config import check_file
from nanoactor.models.errors import ModelError
from nanoactor.runtime.native import native_calls
from nanoactor.text.added_tokens import add_tokens
from nanoactor.text.patterns import is_bounded


def load_tokenizer(directory: Path, name: str = "tokenizer.json") -> Tokenizer:
    """Load a model's `tokenizer.json` and add the tokens that other files list. Raises `ModelError`
    if it is missing or malformed."""
    path = directory / name
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    check_file(path)
    try:
        with native_calls():
            tokenizer = _read(path)
    except Exception as error:  # the library raises only Exception
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
    add_tokens(tokenizer, directory)
    # Some tokenizers were saved with these settings for training. A prompt must stay unchanged.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(path: Path) -> Tokenizer:
    with path.open("rb") as file:
        has_bom = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    if has_bom:  # the library would parse the mark as JSON
        return Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    return Tokenizer.from_file(str(path))


Piece = tuple[str, bool]
"""A text, and True if the tokenizer should add its own special tokens around it."""


class TextEncoder:
    """Encodes prompts to token ids, and decodes ids to text."""

    def __init__(self, directory: Path, reserved: Sequence[int] = ()) -> None:
        """Load the tokenizer. `reserved` are the ids of placeholders for media, which only the chat
        template may write. In a user's text, their names are ordinary text."""
        self._tokenizer = load_tokenizer(directory)
        self.is_bounded = is_bounded(_pipeline_json(self._tokenizer))
        """True if encoding takes time and memory that are bounded by the length of the text. If
        False, pieces must be encoded in another process."""
        names = [self._tokenizer.id_to_token(token) for token in reserved]
        # Random, so that no text contains a marker that was not inserted here.
        self._markers = {f"\ue000{secrets.token_hex(8)}\ue001": name for name in names if name}
        self._marker_ids = {
            marker: self._encode_as_text(name) for marker, name in self._markers.items()
        }

    def _encode_as_text(self, name: str) -> list[int]:
        """Return the token ids of a special token's name, encoded as ordinary text."""
        previous = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = True
        try:
            ids: list[int] = self._tokenizer.encode(name, add_special_tokens=False).ids
            return ids
        finally:
            self._tokenizer.encode_special_tokens = previous

    def hide_placeholders(self, text: str) -> str:
        """Replace placeholder names in a conversation's text (JSON, not yet rendered) with random
        markers. `encode_rendered` later encodes each marker as the ordinary text of the
        placeholder's name."""
        for marker, name in self._markers.items():
            text = text.replace(name, marker)
        return text

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Encode texts to token ids. Raises `InvalidRequest` for invalid Unicode, or if the library
        fails."""
        return encode_all(self._tokenizer, pieces)

    def encode_text(self, text: str, special: bool = True) -> Int32:
        """Encode a text to token ids, shape (tokens,). `special` adds the tokenizer's own special
        tokens."""
        return np.array(self.encode([(text, special)])[0], np.int32)

    def encode_rendered(self, text: str) -> Int32:
        """Encode a rendered conversation to token ids, shape (tokens,). No special tokens are
        added, because the template has already written them."""
        return self.join_pieces(text, self.encode(self.split_rendered(text)))

    def split_rendered(self, text: str) -> list[Piece]:
        """Split a rendered conversation at the markers that `hide_placeholders` inserted. Return
        only the texts between them."""
        return [(piece, False) for piece in self._split(text) if piece not in self._marker_ids]

    def join_pieces(self, text: str, ids: Sequence[Sequence[int]]) -> Int32:
        """Join the token ids of the pieces that `split_rendered` returned, and insert the ids of
        the markers. `text` is the rendered conversation."""
        remaining = iter(ids)
        parts = [self._marker_ids.get(piece) or next(remaining) for piece in self._split(text)]
        return np.array(list(itertools.chain.from_iterable(parts)), np.int32)

    def id_of(self, tag: str) -> int | None:
        """Return the id of the added token with this text, or None if there is none."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == tag), None)

    def _split(self, text: str) -> list[str]:
        if not any(marker in text for marker in self._markers):
            return [text]
        return re.split("(" + "|".join(map(re.escape, self._markers)) + ")", text)

    def decode(self, token_ids: list[int]) -> str:
        """Decode token ids to text, including special tokens. Raises `InvalidRequest` for an id
        outside the vocabulary."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token in token_ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"token id {token} is not in the vocabulary of {size} ids")
        with as_request_errors("the ids cannot be decoded"):
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _pipeline_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the definitions of a tokenizer's normalizer and pre-tokenizer, as in
    `tokenizer.json`."""
    steps = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    return {name: json.loads(step.__getstate__()) if step else None for name, step in steps.items()}


def encode_all(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[list[int]]:
    """Encode texts to token ids. Raises the errors of `TextEncoder.encode`."""
    with as_request_errors("the prompt cannot be tokenized"):
        return [tokenizer.encode(text, add_special_tokens=special).ids for text, special in pieces]


@contextlib.contextmanager
def as_request_errors(what: str) -> Iterator[None]:
    """Convert errors that the tokenizers library raises in this context to `InvalidRequest` or
    `OutOfResources`. Their messages start with `what`."""
    try:
        with native_calls():
            yield
    except (TypeError, UnicodeError) as error:
        raise InvalidRequest(f"{what} because it is not valid Unicode: {error}") from error
    except MemoryError as error:
        raise OutOfResources(f"{what} because there is not enough memory") from error
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"{what} because the tokenizer failed: {error}") from error
