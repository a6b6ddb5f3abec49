"""Search for the end-of-sequence token in a tokenizer's files, without loading the tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from nanoactor.models.config import check_file
from nanoactor.models.errors import ModelError
from nanoactor.text.template_files import TOKENIZER_CONFIG, optional_json, special_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class EndToken:
    """An end-of-sequence token: its text and its id."""

    text: str
    id: int


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] = {}


class _WithAdded(msgspec.Struct):
    added_tokens: list[_Added] = []


class _WithVocabulary(msgspec.Struct):
    model: _Model


def end_token(directory: Path) -> EndToken | None:
    """Return the tokenizer's `eos_token`. Return None if its files do not name one, or if its id is
    unknown. Raises `ModelError` for malformed files."""
    try:
        config = optional_json(directory / TOKENIZER_CONFIG)
        text = special_tokens(directory, config).get("eos_token")
        listed = config.get("added_tokens_decoder") or {}
        ids = {token["content"]: int(id_) for id_, token in listed.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"the special tokens in {directory} are malformed: {error!r}") from error
    if text is None:
        return None
    found = ids.get(text)
    if found is None:
        found = _find_token_id(directory / "tokenizer.json", text)
    return None if found is None else EndToken(text, found)


def _find_token_id(file: Path, text: str) -> int | None:
    """Return the id of a token in a `tokenizer.json`; None if it is not there or the file is
    unreadable. Added tokens are searched first, because they usually include the end-of-sequence
    token, and reading a vocabulary takes longer."""
    check_file(file)
    try:
        content = file.read_bytes()
        for token in msgspec.json.decode(content, type=_WithAdded).added_tokens:
            if token.content == text:
                return token.id
        return msgspec.json.decode(content, type=_WithVocabulary).model.vocab.get(text)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None  # the tokenizer's process reports the file's error
