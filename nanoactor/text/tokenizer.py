"""A model's tokenizer, read from its files without transformers."""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nanoactor.errors import InvalidRequest
from nanoactor.messages import Int32
from nanoactor.models.errors import ModelError


def load_tokenizer(directory: Path, name: str = "tokenizer.json") -> Tokenizer:
    """The `tokenizer.json` of a model; `ModelError` where it is missing or malformed."""
    path = directory / name
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    try:
        tokenizer = _read(path)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    # Saved with some tokenizers for batches in training; a prompt must arrive as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(path: Path) -> Tokenizer:
    with path.open("rb") as file:
        marked = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    if marked:  # the library takes it for a part of the JSON
        return Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    return Tokenizer.from_file(str(path))


class TextEncoder:
    """Prompts to token ids."""

    def __init__(self, directory: Path, reserved: Sequence[int] = ()) -> None:
        """`reserved`: ids that a conversation's template alone may write, as placeholders."""
        self._tokenizer = load_tokenizer(directory)
        names = [self._tokenizer.id_to_token(token) for token in reserved]
        # Unguessable: no text has them unless it was given them here.
        self._hidden = {f"\ue000{secrets.token_hex(8)}\ue001": name for name in names if name}

    def hide_placeholders(self, text: str) -> str:
        """Return a conversation (JSON, before its template sees it) in which what users spell like
        a placeholder is none; `encode_rendered` makes plain characters of it."""
        for hidden, name in self._hidden.items():
            text = text.replace(name, hidden)
        return text

    def encode_text(self, text: str, special: bool = True) -> Int32:
        """The ids of a text; with `special`, those that the tokenizer adds by itself too."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    def encode_rendered(self, text: str) -> Int32:
        """The ids of a conversation: its template has written all special tokens itself."""
        try:
            return np.concatenate([self._encode_piece(piece) for piece in self._pieces(text)])
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the conversation is not valid Unicode: {error}") from error

    def id_of(self, tag: str) -> int | None:
        """Return the id of a token that was added to the vocabulary for a tag; None without one."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == tag), None)

    def _pieces(self, text: str) -> list[str]:
        """Split a rendered conversation around what was hidden in it."""
        if not any(hidden in text for hidden in self._hidden):
            return [text]
        return re.split("(" + "|".join(map(re.escape, self._hidden)) + ")", text)

    def _encode_piece(self, piece: str) -> Int32:
        spelt = self._hidden.get(piece)
        if spelt is None:
            return np.array(self._tokenizer.encode(piece, add_special_tokens=False).ids, np.int32)
        self._tokenizer.encode_special_tokens = True
        try:
            return np.array(self._tokenizer.encode(spelt, add_special_tokens=False).ids, np.int32)
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids, special tokens included; raises `InvalidRequest` for unknown ones."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token in token_ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"token id {token} is not in the vocabulary of {size} ids")
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
