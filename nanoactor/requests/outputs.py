"""Outputs of the engine, with the same names and structure as in vLLM."""

from __future__ import annotations

import builtins
import dataclasses
import enum
from collections.abc import Sequence


class RequestOutputKind(enum.Enum):
    """Content of each output of a stream."""

    CUMULATIVE = 0
    """All text and tokens generated so far."""
    DELTA = 1
    """Only the text and tokens generated since the previous `RequestOutput`."""
    FINAL_ONLY = 2
    """A single output, after the request has finished."""


@dataclasses.dataclass(slots=True)
class Logprob:
    """Log-probability of a token in the model's own distribution, that is, before temperature and
    all other sampling rules are applied."""

    logprob: float
    rank: int | None = None
    """Rank of the token by probability; 1 is the likeliest token."""
    decoded_token: str | None = None
    """Text of the token; None if the engine has no tokenizer."""
    bytes: bytes | None = None
    """Bytes of the token; None if the engine has no tokenizer. Where they are not complete UTF-8
    characters, `decoded_token` has replacement characters."""

    @classmethod
    def of(cls, logprob: float, rank: int, piece: builtins.bytes | None) -> Logprob:
        """Create the entry of a token from its bytes, or from None if the engine has no
        tokenizer."""
        text = None if piece is None else piece.decode(errors="replace")
        return cls(logprob, rank, text, piece)


Logprobs = dict[int, Logprob]
"""Log-probabilities at one position, by token id: first the chosen token, then the likeliest
tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The part of a sequence that one engine has already sent to the client. Another engine uses it
    to continue the sequence."""

    token_ids: Sequence[int] = ()
    """Ids of all output tokens so far."""
    characters: int = 0
    """Number of output characters sent so far. The text of the last tokens may be missing:
    incomplete characters and possible beginnings of a stop string are held back."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while the sequence is running."""
    stop_reason: int | str | None = None
    """Stop string, or id of the stop token, that ended the sequence. None if something else ended
    it, such as an end-of-sequence token or the length limit."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all output tokens so far; None unless log-probabilities were
    requested."""
    logprobs: list[Logprobs] | None = None
    """One entry per element of `token_ids`; None unless log-probabilities were requested."""
    text_offsets: list[int] | None = None
    """Number of output characters before each token in `token_ids`; None unless log-probabilities
    were requested."""

    def finished(self) -> bool:
        """Return True if the sequence has finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times at which a request reached each stage, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """Start of the request's first step on the device; None until the request has finished."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Time of the latest token so far; None before the first token."""
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, as observed in the caller's event loop. None
        before the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A request's output at the time it was yielded."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache; 0 until the request has finished."""
    num_preemptions: int = 0
    """Number of times the sequence was preempted; 0 until the request has finished."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Log-probabilities of the prompt, one entry per token. The first entry is None. The list is
    None if it was not requested, or if the request was aborted before it was computed. With output
    kind DELTA, only the first output has the list."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """A sequence found by a beam search."""

    tokens: list[int]
    """Ids of the prompt tokens and the output tokens. The token that ended the sequence is
    included."""
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    """Log-probabilities at each output position: the chosen token and the likeliest tokens."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the output tokens."""
    text: str | None = None
    """Text of `tokens`, special tokens included; None if the engine has no tokenizer."""
    finish_reason: str | None = None
    """"stop" if a token ended the sequence, "length" if the length limit did."""
    stop_reason: int | None = None
    """Id of the token that ended the sequence; None if the length limit ended it."""


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search over one prompt."""

    sequences: list[BeamSearchSequence]
    """Sequences, best first. There are `beam_width` of them, or fewer if the vocabulary is too
    small."""
