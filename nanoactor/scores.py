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
    """The log-probabilities of some tokens, by the model's own distribution: before temperature
    and every rule."""

    logprobs: Float32
    ranks: Int32
    """Of each token: 1 is the likeliest."""
    counts: Int32
    """Number of top tokens returned with each token."""
    top_ids: Int32
    """Ids of the top tokens, likeliest first, concatenated over the tokens."""
    top_logprobs: Float32
    """Log-probabilities of `top_ids`."""


@message(28)
class ScoreRequests:
    """Sequences of which log-probabilities are wanted."""

    rows: Int32
    """Indices among the sequences that are introduced."""
    output: Int32
    """Number of top tokens returned with each output token; -1: none."""
    prompt: Int32
    """Likewise of the prompt."""


@message(35)
class StepScores:
    """The log-probabilities of a step: of the prompts' tokens, then of sampled ones."""

    rows: Int32
    """The row whose token each of the sampled ones is."""
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
    """Log-probabilities with the bytes of all tokens that they name; in runs, as `RequestScores`.
    Those of output are of the delta's `token_ids`, one for each."""

    uids: Int64
    prompts: NDArray[np.bool_]
    counts: Int32
    offsets: Int32
    """Of each token of output: how many characters of text come before it; 0 for prompts."""
    pieces: bytes
    """The bytes of each token, then of those told beside it; none where there is no tokenizer."""
    lengths: Int32
    """Number of `pieces` that belong to each token."""
    scores: TokenScores
