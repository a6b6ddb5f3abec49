"""Sampling parameters of the rows of a step: NumPy arrays on the host, tensors on the device."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingGroups(Generic[T]):
    """Row indices, int64, by sampling method. The host computes them, so that no step waits for the
    device."""

    greedy: T
    """Rows with a temperature of 0."""
    plain: T
    """Rows that sample without top-k, top-p or min-p."""
    limited: T
    """Rows with a top-k of at most `limits.CANDIDATES`."""
    unlimited: T
    """Rows with a top-k above `limits.CANDIDATES`."""
    nucleus: T
    """Rows with top-p or min-p but without top-k."""
    masked_rows: T
    """Row of each id in `masked_ids`, token ids that the row must not choose yet (`min_tokens`)."""
    masked_ids: T


@dataclasses.dataclass(frozen=True, slots=True)
class LogitRules(Generic[T]):
    """The logit rules of a step's rows: allowed ids, bad words, biases and penalties. The host
    computes the indices. All fields are int64 except `biases` and `longest`."""

    penalized: T
    """Rows that have a penalty."""
    allowed: T
    """Rows that may choose only ids in `allowed_ids`."""
    allowed_rows: T
    """Row of each id in `allowed_ids`."""
    allowed_ids: T
    biased_rows: T
    """Row of each id in `biased_ids`."""
    biased_ids: T
    biases: T
    """Bias that is added to the logit of each id in `biased_ids`, float32."""
    word_rows: T
    """Row of each bad word in `words`."""
    words: T
    """Token ids of each bad word, (words, tokens of the longest word), padded with -1 on the left.
    The last id of a word is excluded if the output ends with the ids before it in the word."""
    longest: int = 0
    """Upper limit of the sequence lengths of the rows in `penalized`."""
