"""Rules on the token ids of a step's rows (allowed ids, biases and bad words), laid out in arrays
for the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32, TokenRules
from nanoactor.models.sampling.rows import LogitRules
from nanoactor.runner.batch.inputs import NO_INDICES, Array, Long

_NO_BIASES: NDArray[np.float32] = np.empty(0, np.float32)


def lay_out_rules(rules_by_row: list[tuple[int, TokenRules]], penalized: Long) -> LogitRules[Array]:
    """Lay out the rules of several rows. `rules_by_row` contains (row, rules) pairs, and
    `penalized` lists the rows with a penalty."""
    words = [(row, word) for row, rules in rules_by_row for word in _words(rules)]
    allowed = [(row, rules.allowed_ids) for row, rules in rules_by_row if len(rules.allowed_ids)]
    allowed_rows, allowed_ids = _pairs(allowed)
    biased_rows, biased_ids = _pairs([(row, rules.bias_ids) for row, rules in rules_by_row])
    return LogitRules(
        penalized=penalized,
        allowed=np.array([row for row, _ in allowed], np.int64),
        allowed_rows=allowed_rows,
        allowed_ids=allowed_ids,
        biased_rows=biased_rows,
        biased_ids=biased_ids,
        biases=np.concatenate([_NO_BIASES, *(rules.biases for _, rules in rules_by_row)]),
        word_rows=np.array([row for row, _ in words], np.int64),
        words=_padded([word for _, word in words]),
    )


def _words(rules: TokenRules) -> list[Int32]:
    counts = rules.word_lengths
    pairs = zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)
    return [rules.word_ids[end - count : end] for end, count in pairs]


def _padded(words: list[Int32]) -> Long:
    """Return bad words as the rows of one array, (words, longest word), padded with -1 on the
    left."""
    width = max(map(len, words), default=1)
    lines = np.full((len(words), width), -1, np.int64)
    for line, word in zip(lines, words, strict=True):
        line[width - len(word) :] = word
    return lines


def _pairs(found: list[tuple[int, Int32]]) -> tuple[Long, Long]:
    """Concatenate the ids of several rows. Return the row of each id, and the ids, int64 (ids,)
    each."""
    rows = [np.full(len(ids), row, np.int64) for row, ids in found]
    ids = [ids.astype(np.int64) for _, ids in found]
    return np.concatenate([NO_INDICES, *rows]), np.concatenate([NO_INDICES, *ids])
