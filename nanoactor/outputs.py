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
    """The log-probability of a token, by the model's own distribution: before temperature and
    every rule."""

    logprob: float
    rank: int | None = None
    """1 is the likeliest."""
    decoded_token: str | None = None
    """None where the engine has no tokenizer."""
    bytes: bytes | None = None
    """Those of the token: `decoded_token` replaces what is no whole character."""

    @classmethod
    def of(cls, logprob: float, rank: int, piece: builtins.bytes | None) -> Logprob:
        """Make one of a token with these bytes."""
        text = None if piece is None else piece.decode(errors="replace")
        return cls(logprob, rank, text, piece)


Logprobs = dict[int, Logprob]
"""By token id: the token itself, then the likeliest in its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The part of an answer that its reader was told before: another engine goes on behind it."""

    token_ids: Sequence[int] = ()
    """Its tokens, from the first on."""
    characters: int = 0
    """Characters of its text that were told. The text of the last tokens may not have been: half a
    character, or what may become a stop string, is held back."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end-of-sequence and other ends."""
    cumulative_logprob: float | None = None
    """Of the whole output so far; None unless log-probabilities were asked for."""
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`; None unless they were asked for."""
    text_offsets: list[int] | None = None
    """Likewise: how many characters of the output come before each token."""

    def finished(self) -> bool:
        """Return True if the sequence is finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """When the device took up its first step; known at the end."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Of the latest so far."""
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival to its first token at the user's loop."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of one request when it was yielded."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held; known at the end."""
    num_preemptions: int = 0
    """Number of times that the sequence was preempted; known at the end."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each token of the prompt, None for the first; None unless they were asked for, or
    where the request was aborted before. Of output kind DELTA the first output alone has them."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences that a beam search has found."""

    tokens: list[int]
    """The prompt's, then the output's, the one that ended it included."""
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    """For each token of output: the likeliest in its place, of which it is one."""
    cum_logprob: float = 0.0
    """The sum of the output's."""
    text: str | None = None
    """That of `tokens`, special ones included; None where the engine has no tokenizer."""
    finish_reason: str | None = None
    """Finish reason: "stop" or "length"."""
    stop_reason: int | None = None
    """The token that ended it; None where its length did."""


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search over one prompt."""

    sequences: list[BeamSearchSequence]
    """The best first. As many as `beam_width`, or fewer where a small vocabulary has no more."""
