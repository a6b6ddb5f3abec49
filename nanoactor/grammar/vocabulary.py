"""A model's tokens as the grammars' parser needs them."""

from __future__ import annotations

import json
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from nanoactor.errors import ModelError, UnsupportedModel
from nanoactor.text.tokenizer import load_tokenizer

# A lexeme that allows all texts that match one of these gets the mask of their tokens without a
# walk over the vocabulary: 0.2 ms, not 3.5 ms, for 150,000 ids. The library's own are for strings
# in JSON; ours is for free text before a tag.
_SLICES = [*LLTokenizer.general_slices(), "[^<]+"]


def _without_added(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return the tokenizer without added tokens from id `size` on, which the model cannot say:
    a padding token that its embedding was not enlarged for, say."""
    added = tokenizer.get_added_tokens_decoder()
    if max(added, default=-1) < size:
        return tokenizer
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(data))


class Vocabulary:
    """The bytes of each token, and the special ones, as one table for all grammars."""

    def __init__(self, tokenizer_file: Path, size: int, eos_ids: tuple[int, ...]) -> None:
        """Read a `tokenizer.json`: 2 to 4 s of one core, and 230 MB, for 150,000 ids.

        `size` counts the model's ids: the tokenizer's and perhaps more that are never allowed.
        `eos_ids` end a sequence. Raises `ModelError` if the file, or its content, is unusable.
        """
        tokenizer = load_tokenizer(tokenizer_file.parent, tokenizer_file.name)
        tokenizer = _without_added(tokenizer, size)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.size = size
        """Ids that the model knows."""
        self.words = -(-size // 32)
        """Words of 32 bits in a mask with a bit for each id."""
        self.tokens = max(ids.values(), default=-1) + 1
        """Ids up to the tokenizer's last; those from here on are never allowed."""
        self.eos_ids = eos_ids
        """Ids that end a sequence."""
        if self.tokens > size:
            raise ModelError(
                f"{tokenizer_file} has ids up to {self.tokens - 1}, but the model has only "
                f"{size} ids"
            )
        if not eos_ids or max(eos_ids) >= self.tokens or min(eos_ids) < 0:
            raise UnsupportedModel(
                "an answer under a grammar ends with an end-of-sequence token, but the "
                f"model's end-of-sequence ids, {list(eos_ids)}, are not in {tokenizer_file}"
            )
        if self.tokens != len(ids):
            # The library sizes its table by their count and would index past its end.
            raise UnsupportedModel(
                f"{tokenizer_file} has {len(ids)} tokens, but ids up to {self.tokens - 1}: "
                "grammars need a tokenizer without gaps"
            )
        # The library writes what a grammar forces through these, and would get other bytes: those
        # of Unicode's composed form, where Qwen's tokenizers are concerned.
        tokenizer.normalizer = None
        try:
            self.table = LLTokenizer(
                tokenizer.to_str(), n_vocab=size, eos_token=list(eos_ids), slices=_SLICES
            )
            """The library's table."""
        except ValueError as error:
            raise UnsupportedModel(
                f"{tokenizer_file} is of a kind that grammars cannot use: {error}"
            ) from error
        added = tokenizer.get_added_tokens_decoder()
        self._special = {
            token.content: id_ for id_, token in added.items() if self.table.is_special_token(id_)
        }

    def special(self, text: str) -> int | None:
        """Return the id of a special token, which plain text never yields; None if there is
        none."""
        return self._special.get(text)
