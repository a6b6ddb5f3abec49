"""A model's tokenizer, read from its files without transformers."""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nanoactor.errors import InvalidRequest
from nanoactor.messages import Int32
from nanoactor.models.errors import ModelError


def load_tokenizer(directory: Path) -> Tokenizer:
    """The `tokenizer.json` of a model; `ModelError` where it is missing or malformed."""
    path = directory / "tokenizer.json"
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

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory)

    def encode_text(self, text: str, special: bool = True) -> Int32:
        """The ids of a text; with `special`, those that the tokenizer adds by itself too."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    def encode_rendered(self, text: str) -> Int32:
        """The ids of a conversation: its template has written all special tokens itself."""
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the conversation is not valid Unicode: {error}") from error

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids, special tokens included; raises `InvalidRequest` for unknown ones."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token in token_ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"token id {token} is not in the vocabulary of {size} ids")
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
