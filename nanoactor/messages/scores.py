"""Messages, and parts of messages, that carry log-probabilities from the device to the user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@message(7)
class TokenScores:
    """Log-probabilities of tokens in the model's own distribution, before temperature and any
    rules."""

    logprobs: Float32
    ranks: Int32
    """Rank of each token, 1 for the likeliest."""
    counts: Int32
    """Number of top tokens returned with each token."""
    top_ids: Int32
    """Ids of the top tokens, likeliest first, concatenated over the tokens."""
    top_logprobs: Float32
    """Log-probabilities of `top_ids`."""


@message(28)
class ScoreRequests:
    """Sequences for which log-probabilities are requested."""

    rows: Int32
    """Indices into the admitted sequences."""
    output: Int32
    """Number of top tokens returned with each output token; -1 for no log-probabilities."""
    prompt: Int32
    """Number of top tokens returned with each prompt token; -1 for no log-probabilities."""


@message(35)
class StepScores:
    """Log-probabilities of a step: first those of prompt tokens, then those of sampled tokens."""

    rows: Int32
    """Index of the row of each sampled token."""
    scores: TokenScores


@message(53)
class RequestScores:
    """Log-probabilities in runs, each of one request."""

    uids: Int64
    prompts: NDArray[np.bool_]
    """For each run: True for prompt scores, which continue an earlier run, and False for the score
    of an output token in the same message."""
    counts: Int32
    scores: TokenScores


@message(64)
class ToldScores:
    """Log-probabilities in runs, as in `RequestScores`, with the bytes of all their tokens. Output
    runs have one score for each of the delta's `token_ids`."""

    uids: Int64
    prompts: NDArray[np.bool_]
    counts: Int32
    offsets: Int32
    """For each output token, the number of characters of text before it; 0 for prompts."""
    pieces: bytes
    """The bytes of each token, then of its top tokens; empty if there is no tokenizer."""
    lengths: Int32
    """Length in bytes of each token in `pieces`."""
    scores: TokenScores
