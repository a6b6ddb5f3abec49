"""Log-probabilities on their way from the device to the user: messages, and parts of messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@message(7)
class TokenScores:
    """Log-probabilities of tokens in the model's own distribution, before temperature and all
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
    """Number of top tokens returned with each output token; -1: none."""
    prompt: Int32
    """Number of top tokens returned with each prompt token; -1: none."""


@message(35)
class StepScores:
    """The log-probabilities of a step: of prompt tokens, then of sampled tokens."""

    rows: Int32
    """The row of each sampled token."""
    scores: TokenScores


@message(53)
class RequestScores:
    """Log-probabilities on their way to their requests, in runs."""

    uids: Int64
    prompts: NDArray[np.bool_]
    """True for a run of prompt scores that continues an earlier one; False for the score of the
    output token that it travels with."""
    counts: Int32
    scores: TokenScores


@message(64)
class ToldScores:
    """Log-probabilities with the bytes of all tokens in them; in runs, as in `RequestScores`.
    Those of output are one for each of the delta's `token_ids`."""

    uids: Int64
    prompts: NDArray[np.bool_]
    counts: Int32
    offsets: Int32
    """For each output token, the number of characters of text before it; 0 for prompts."""
    pieces: bytes
    """The bytes of each token, then of its top tokens; empty if there is no tokenizer."""
    lengths: Int32
    """Number of `pieces` that belong to each token."""
    scores: TokenScores
