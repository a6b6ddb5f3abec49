"""Outputs of requests for embedding vectors and scores, with the same names and structure as in
vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.requests.outputs import RequestMetrics

Float32 = NDArray[np.float32]


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """The embedding vector of one text."""

    embedding: Float32
    """Embedding vector, shape (dimensions,), float32."""


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """The score of one pair of texts."""

    score: float
    """Probability of a match, from 0 to 1. For embedding models, the cosine of the two vectors,
    from -1 to 1."""


@dataclasses.dataclass(slots=True)
class EmbeddingRequestOutput:
    """The output of a request for an embedding vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    metrics: RequestMetrics
    finished: bool = True


@dataclasses.dataclass(slots=True)
class ScoringRequestOutput:
    """The output of a request for a score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Token ids of the scored pair. For embedding models, the ids of the query, then the
    document."""
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True


def postprocess_vector(vector: Float32, *, dimensions: int | None, normalize: bool) -> Float32:
    """Truncate a vector to its first `dimensions` elements (None keeps all), and scale it to length
    1 if `normalize` is True.

    A zero vector stays zero. The norm in the division is at least 1e-12, as in
    `torch.nn.functional.normalize`.
    """
    truncated = vector[:dimensions]
    if not normalize:
        return truncated.copy()
    length = np.linalg.norm(truncated)
    scaled: Float32 = truncated / max(length, np.float32(1e-12))
    return scaled


def match_probability(logits: Float32) -> float:
    """Compute the probability of a match from a reranker's two logits, "no" and "yes": the softmax
    of "yes"."""
    no, yes = (float(logit) for logit in logits)
    return float(1 / (1 + np.exp(np.clip(no - yes, -700, 700))))


def cosine(first: Float32, second: Float32) -> float:
    """Compute the cosine of two vectors that have length 1: their dot product in float64."""
    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def pair_score(
    first: EmbeddingRequestOutput, second: EmbeddingRequestOutput
) -> ScoringRequestOutput:
    """Return the score of a pair of texts, which is the cosine of their embeddings. Both embeddings
    must have length 1."""
    ids: Sequence[Any] = first.prompt_token_ids + second.prompt_token_ids
    return ScoringRequestOutput(
        request_id=first.request_id,
        outputs=ScoringOutput(cosine(first.outputs.embedding, second.outputs.embedding)),
        prompt_token_ids=list(ids),
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        metrics=second.metrics,
    )
