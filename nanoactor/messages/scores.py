"""Structures for log-probabilities in messages, from the device to the user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@message(7)
class TokenScores:
    """Log-probabilities of tokens under the model's own distribution, before temperature and any
    rules on tokens."""

    logprobs: Float32
    ranks: Int32
    """Rank of each token in that distribution; 1 is the most likely token."""
    counts: Int32
    """Number of top tokens reported with each token."""
    top_ids: Int32
    """Ids of the top tokens, most likely first, concatenated over the tokens."""
    top_logprobs: Float32
    """Log-probabilities of `top_ids`."""


@message(28)
class ScoreRequests:
    """Admitted sequences that request log-probabilities."""

    rows: Int32
    """Rows of these sequences among the admitted ones (`Admissions`)."""
    output: Int32
    """Number of top tokens to report with each output token; -1 for no log-probabilities."""
    prompt: Int32
    """Number of top tokens to report with each prompt token; -1 for no log-probabilities."""


@message(35)
class StepScores:
    """Log-probabilities from one step: first those of prompt tokens, then those of sampled
    tokens."""

    rows: Int32
    """For each sampled token with scores, the index of its row in the step."""
    scores: TokenScores


@message(53)
class RequestScores:
    """Log-probabilities of tokens, grouped into runs that each belong to one request."""

    uids: Int64
    prompts: NDArray[np.bool_]
    """For each run: True if it scores prompt tokens, following the request's earlier runs; False if
    it scores one output token in the same message."""
    counts: Int32
    scores: TokenScores


@message(64)
class ToldScores:
    """Log-probabilities of tokens, grouped into runs as in `RequestScores`, with the bytes of all
    their tokens. Output runs have one score for each of the `token_ids` in the same
    `OutputDelta`."""

    uids: Int64
    prompts: NDArray[np.bool_]
    counts: Int32
    offsets: Int32
    """For each output token, the number of characters of text before it; 0 for prompt tokens."""
    pieces: bytes
    """The bytes of each token, followed by those of its top tokens; empty if there is no
    tokenizer."""
    lengths: Int32
    """Length of each token in `pieces`, in bytes."""
    scores: TokenScores
