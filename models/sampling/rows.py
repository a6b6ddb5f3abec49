"""Sampling of rows: as NumPy arrays on the host, as tensors on the device."""

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
    """Rows with another top-k."""
    nucleus: T
    """Rows with top-p or min-p alone."""
    masked_rows: T
    """Rows of `masked_ids`, the ids that must not be chosen (`min_tokens`)."""
    masked_ids: T


@dataclasses.dataclass(frozen=True, slots=True)
class LogitRules(Generic[T]):
    """The rules of some rows of logits. Indices are prepared on the host; all but `biases` and
    `longest` are int64."""

    penalized: T
    """Rows with a penalty."""
    allowed: T
    """Rows that may choose only the ids in `allowed_ids`."""
    allowed_rows: T
    """The row of each of `allowed_ids`."""
    allowed_ids: T
    biased_rows: T
    biased_ids: T
    biases: T
    """float32: added to the logit of each of `biased_ids`."""
    word_rows: T
    """The row of each bad word."""
    words: T
    """(words, tokens of the longest): its ids, padded with -1 on the left. The last is excluded if
    the output ends with those before it."""
    longest: int = 0
    """Upper bound of the length of the longest of `penalized`."""
