"""Outputs of the engine, in vLLM's shapes."""

from __future__ import annotations

import builtins
import dataclasses
import enum
from collections.abc import Sequence


class RequestOutputKind(enum.Enum):
    """The content of each output of a stream."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """New output since the previous `RequestOutput`."""
    FINAL_ONLY = 2
    """One output, at the end."""


@dataclasses.dataclass(slots=True)
class Logprob:
    """The log-probability of a token in the model's own distribution, before temperature and all
    rules."""

    logprob: float
    rank: int | None = None
    """Rank, 1 for the likeliest token."""
    decoded_token: str | None = None
    """None where the engine has no tokenizer."""
    bytes: bytes | None = None
    """The token's bytes; `decoded_token` replaces incomplete characters."""

    @classmethod
    def of(cls, logprob: float, rank: int, piece: builtins.bytes | None) -> Logprob:
        """Return the log-probability of a token with these bytes."""
        text = None if piece is None else piece.decode(errors="replace")
        return cls(logprob, rank, text, piece)


Logprobs = dict[int, Logprob]
"""By token id: the token itself, then the likeliest at its position."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The part of a sequence already emitted to its reader: another engine continues after it."""

    token_ids: Sequence[int] = ()
    """Its tokens, from the first."""
    characters: int = 0
    """Characters of its text that were emitted. The text of the last tokens may be missing: an
    incomplete character, or a possible start of a stop string, is held back."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while it is running."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end-of-sequence and other ends."""
    cumulative_logprob: float | None = None
    """Sum over the output so far; None unless log-probabilities were requested."""
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`; None unless requested."""
    text_offsets: list[int] | None = None
    """Likewise, the number of output characters before each token."""

    def finished(self) -> bool:
        """Return True if the sequence is finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """Start of its first step on the device; known at the end."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Time of the latest token so far."""
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from arrival to the first token on the user's loop."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of a request at the time it was yielded."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; known at the end."""
    num_preemptions: int = 0
    """Number of times that the sequence was preempted; known at the end."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each prompt token, None for the first; None unless requested, or if the request was
    aborted before they were known. With output kind DELTA, only the first output has them."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """A sequence found by a beam search."""

    tokens: list[int]
    """Prompt tokens, then output tokens, including one that ended the sequence."""
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    """For each output token: the likeliest tokens at its position, including itself."""
    cum_logprob: float = 0.0
    """Sum over the output tokens."""
    text: str | None = None
    """Text of `tokens`, special ones included; None if the engine has no tokenizer."""
    finish_reason: str | None = None
    """Finish reason: "stop" or "length"."""
    stop_reason: int | None = None
    """The token that ended it; None if the length limit did."""


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search over one prompt."""

    sequences: list[BeamSearchSequence]
    """Best first. `beam_width` sequences, or fewer if a small vocabulary has no more."""
