"""Conversion of bad words to token ids, and a check that the rules of a request allow at least one
token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from nanoactor.errors import InvalidRequest
from nanoactor.messages.engine import Stopping, TokenRules
from nanoactor.requests.params import MAX_BAD_WORD_TOKENS


def spellings(words: Sequence[str]) -> list[str]:
    """Return two spellings of each word, as it is and with a leading space, because tokenizers
    encode a word differently inside a text."""
    return [text for word in words for text in (word, " " + word.lstrip())]


def with_bad_words(
    rules: TokenRules, words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> TokenRules:
    """Return a copy of `rules` that also forbids `words`: each word as it is and with a leading
    space, because tokenizers encode a word differently inside a text. Raises `InvalidRequest` for a
    word of more than `MAX_BAD_WORD_TOKENS` tokens."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in spellings([word]):
            ids = tuple(encode(text))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words contains {word!r:.60}, which has {len(ids)} tokens, but at "
                    f"most {MAX_BAD_WORD_TOKENS} are supported"
                )
            if ids:
                sequences[ids] = None
    return dataclasses.replace(
        rules,
        word_ids=np.array([token for ids in sequences for token in ids], np.int32),
        word_lengths=np.array([len(ids) for ids in sequences], np.int32),
    )


def check_tokens_remain(rules: TokenRules, stopping: Stopping) -> None:
    """Raise `InvalidRequest` if a request's rules forbid every possible first output token."""
    allowed = set(rules.allowed_ids.tolist())
    if not allowed:
        return
    ends = np.cumsum(rules.word_lengths)
    banned = set(rules.word_ids[ends[rules.word_lengths == 1] - 1].tolist())
    if stopping.min_tokens:
        banned |= {*stopping.eos_ids, *stopping.stop_ids}
    if allowed <= banned:
        raise InvalidRequest(
            "allowed_token_ids, bad_words and min_tokens together leave no token to choose, "
            "because each of the allowed ids is a bad word or would end the output before "
            "min_tokens"
        )
