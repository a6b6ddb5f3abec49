"""Sampling parameters of rows: NumPy arrays on the host, tensors on the device."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingGroups(Generic[T]):
    """Rows grouped by sampling method. Indices are prepared on the host, so that no step waits for
    the device; all are int64."""

    greedy: T
    """Rows with temperature 0."""
    plain: T
    """Rows that sample from the whole vocabulary."""
    limited: T
    """Rows with a top-k of at most `limits.CANDIDATES`."""
    unlimited: T
    """Rows with a top-k above `limits.CANDIDATES`."""
    nucleus: T
    """Rows with top-p or min-p, but without top-k."""
    masked_rows: T
    """The row of each id in `masked_ids`, which must not be chosen (`min_tokens`)."""
    masked_ids: T


@dataclasses.dataclass(frozen=True, slots=True)
class LogitRules(Generic[T]):
    """The rules of some rows of logits. Indices are prepared on the host; all fields but `biases`
    and `longest` are int64."""

    penalized: T
    """Rows with a penalty."""
    allowed: T
    """Rows that may choose only the ids in `allowed_ids`."""
    allowed_rows: T
    """The row of each id in `allowed_ids`."""
    allowed_ids: T
    biased_rows: T
    """The row of each id in `biased_ids`."""
    biased_ids: T
    biases: T
    """Bias added to the logit of each id in `biased_ids`, float32."""
    word_rows: T
    """The row of each bad word."""
    words: T
    """Token ids of each bad word, (words, tokens of the longest), padded with -1 on the left. The
    last id is excluded if the output ends with the ids before it."""
    longest: int = 0
    """Upper bound on the sequence lengths of the rows in `penalized`."""
