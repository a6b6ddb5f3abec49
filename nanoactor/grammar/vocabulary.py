"""A model's vocabulary, in the form that the grammar parser needs."""

from __future__ import annotations

import json
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from nanoactor.errors import ModelError, UnsupportedModel
from nanoactor.text.tokenizer import load_tokenizer

# If a lexeme allows all texts that match one of these expressions, the mask of their tokens is
# computed without walking the vocabulary: in 0.2 ms instead of 3.5 ms for 150,000 ids. The
# library's own expressions are for JSON strings; the last one is for free text before a tag.
_SLICES = [*LLTokenizer.general_slices(), "[^<]+"]


def _without_added(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return the tokenizer without added tokens whose ids are `size` or more. The model cannot
    produce such tokens, for example a padding token that was added without enlarging the
    embedding."""
    added = tokenizer.get_added_tokens_decoder()
    if max(added, default=-1) < size:
        return tokenizer
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(data))


class Vocabulary:
    """The byte sequences and special tokens of a model's vocabulary, in one table that all grammars
    use."""

    def __init__(self, tokenizer_file: Path, size: int, eos_ids: tuple[int, ...]) -> None:
        """Read a `tokenizer.json`. For 150,000 ids, this takes 2 to 4 s on one core, and 230 MB.

        `size` is the model's number of ids. It may exceed that of the tokenizer; the additional ids
        are never allowed. `eos_ids` are the end-of-sequence ids. Raises `ModelError` if the file or
        its content cannot be used.
        """
        tokenizer = load_tokenizer(tokenizer_file.parent, tokenizer_file.name)
        tokenizer = _without_added(tokenizer, size)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.size = size
        """Number of token ids of the model."""
        self.words = -(-size // 32)
        """Number of int32 words in a mask, which has one bit for each id."""
        self.tokens = max(ids.values(), default=-1) + 1
        """Highest id of the tokenizer plus 1. This id and all higher ones are never allowed."""
        self.eos_ids = eos_ids
        """End-of-sequence token ids."""
        if self.tokens > size:
            raise ModelError(
                f"{tokenizer_file} has token ids up to {self.tokens - 1}, but the model's "
                f"vocabulary has only {size} ids"
            )
        if not eos_ids or max(eos_ids) >= self.tokens or min(eos_ids) < 0:
            raise UnsupportedModel(
                "an answer with a grammar must end with an end-of-sequence token, but the "
                f"model's end-of-sequence ids, {list(eos_ids)}, are not in {tokenizer_file}"
            )
        if self.tokens != len(ids):
            # The library sizes a table by the number of tokens and would read past its end.
            raise UnsupportedModel(
                f"{tokenizer_file} has {len(ids)} tokens, but ids up to {self.tokens - 1}; "
                "grammars require a tokenizer whose ids have no gaps"
            )
        # The library uses this tokenizer to encode text that a grammar forces. A normalizer would
        # change that text; for example, that of Qwen's tokenizers composes Unicode characters.
        tokenizer.normalizer = None
        try:
            self.table = LLTokenizer(
                tokenizer.to_str(), n_vocab=size, eos_token=list(eos_ids), slices=_SLICES
            )
            """Token table of the grammar library."""
        except ValueError as error:
            raise UnsupportedModel(
                f"{tokenizer_file} has a tokenizer that grammars do not support: {error}"
            ) from error
        added = tokenizer.get_added_tokens_decoder()
        self._special = {
            token.content: id_ for id_, token in added.items() if self.table.is_special_token(id_)
        }

    def special(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none. A grammar must
        refer to a special token by its id, because plain text never encodes to a special token."""
        return self._special.get(text)
