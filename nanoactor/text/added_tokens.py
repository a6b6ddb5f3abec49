"""Tokens that transformers adds to a `tokenizer.json` from the files next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nanoactor.models.errors import ModelError
from nanoactor.text.template_files import CONFIG, SPECIAL, optional_json, special_tokens

ADDED = "added_tokens.json"


def add_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Add the tokens that other files list to a tokenizer that was read from its own file.

    New ids follow the existing ones, whatever the files contain. Raises `ModelError` if the files
    give a token another id, or are malformed. The order is that of transformers'
    `TokenizersBackend`.
    """
    try:
        config = optional_json(directory / CONFIG)
        listed = _listed(directory, config)
        special = _special(directory, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"the added tokens in {directory} are malformed: {error!r}") from error
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    fresh = [token for _, token in sorted(listed.items()) if repr(token) not in known]
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names |= {token.content for token in fresh}
    for token in special:
        if token.content not in names:
            names.add(token.content)
            fresh.append(token)
    if fresh:
        tokenizer.add_tokens(fresh)
    _check_ids(tokenizer, listed, directory)
    if config.get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True


def _listed(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens that a file lists with their ids."""
    if "added_tokens_decoder" in config:
        return {int(id_): _token(token) for id_, token in config["added_tokens_decoder"].items()}
    special = {token.content for token in _special(directory, config)}
    return {
        id_: AddedToken(name, normalized=name not in special, special=name in special)
        for name, id_ in optional_json(directory / ADDED).items()
    }


def _special(directory: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens that a file lists without ids."""
    older = {} if "added_tokens_decoder" in config else optional_json(directory / SPECIAL)
    found = [AddedToken(text, special=True) for text in special_tokens(directory, config).values()]
    for given in (config, older):
        for name in ("extra_special_tokens", "additional_special_tokens"):
            found += _extra(given.get(name))
    return found


def _extra(given: Any) -> Iterator[AddedToken]:
    if isinstance(given, list):
        for token in given:
            yield AddedToken(token, special=True) if isinstance(token, str) else _token(token)


def _token(given: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(given["content"], **{name: given[name] for name in flags if name in given})


def _check_ids(tokenizer: Tokenizer, listed: Mapping[int, AddedToken], directory: Path) -> None:
    for id_, token in listed.items():
        found = tokenizer.token_to_id(token.content)
        if found != id_:
            raise ModelError(
                f"{directory}: the token {token.content!r:.100} has the id {found} in "
                f"tokenizer.json, but {id_} in {CONFIG} or {ADDED}"
            )
