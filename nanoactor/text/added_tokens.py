"""Tokens that a model's other files add to those of its `tokenizer.json`, as in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nanoactor.models.errors import ModelError
from nanoactor.text.template_files import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    optional_json,
    special_tokens,
)

ADDED_TOKENS = "added_tokens.json"


def add_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Add to `tokenizer`, which was loaded from the `tokenizer.json` in `directory`, the tokens
    that only the model's other files list.

    New tokens get the next free ids, in the order that transformers' `TokenizersBackend` uses.
    Raises `ModelError` if a file is malformed, or if it lists a token under a different id than it
    has in the tokenizer.
    """
    try:
        config = optional_json(directory / TOKENIZER_CONFIG)
        tokens_by_id = _tokens_by_id(directory, config)
        special = _special_tokens(directory, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"the added tokens in {directory} are malformed: {error!r}") from error
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    new_tokens = [token for _, token in sorted(tokens_by_id.items()) if repr(token) not in known]
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names |= {token.content for token in new_tokens}
    for token in special:
        if token.content not in names:
            names.add(token.content)
            new_tokens.append(token)
    if new_tokens:
        tokenizer.add_tokens(new_tokens)
    _check_ids(tokenizer, tokens_by_id, directory)
    if config.get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True


def _tokens_by_id(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens that `tokenizer_config.json` or `added_tokens.json` lists, by id."""
    if "added_tokens_decoder" in config:
        return {
            int(id_): _added_token(token) for id_, token in config["added_tokens_decoder"].items()
        }
    special = {token.content for token in _special_tokens(directory, config)}
    return {
        id_: AddedToken(name, normalized=name not in special, special=name in special)
        for name, id_ in optional_json(directory / ADDED_TOKENS).items()
    }


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens that the model's files list without ids."""
    legacy = (
        {} if "added_tokens_decoder" in config else optional_json(directory / SPECIAL_TOKENS_MAP)
    )
    found = [AddedToken(text, special=True) for text in special_tokens(directory, config).values()]
    for source in (config, legacy):
        for name in ("extra_special_tokens", "additional_special_tokens"):
            found += _extra_special_tokens(source.get(name))
    return found


def _extra_special_tokens(tokens: Any) -> Iterator[AddedToken]:
    if isinstance(tokens, list):
        for token in tokens:
            yield AddedToken(token, special=True) if isinstance(token, str) else _added_token(token)


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{name: fields[name] for name in flags if name in fields})


def _check_ids(
    tokenizer: Tokenizer, tokens_by_id: Mapping[int, AddedToken], directory: Path
) -> None:
    for id_, token in tokens_by_id.items():
        found = tokenizer.token_to_id(token.content)
        if found != id_:
            raise ModelError(
                f"{directory}: the token {token.content!r:.100} has the id {found} in "
                f"tokenizer.json, but {id_} in {TOKENIZER_CONFIG} or {ADDED_TOKENS}"
            )
