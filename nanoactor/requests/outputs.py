"""Outputs of the engine, with the names and structure of vLLM's."""

from __future__ import annotations

import builtins
import dataclasses
import enum
from collections.abc import Sequence


class RequestOutputKind(enum.Enum):
    """Content of each output of a stream."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """New output since the previous `RequestOutput`."""
    FINAL_ONLY = 2
    """A single output at the end."""


@dataclasses.dataclass(slots=True)
class Logprob:
    """The log-probability of a token in the model's own distribution, before temperature and all
    other rules apply."""

    logprob: float
    rank: int | None = None
    """Rank of the token; 1 for the likeliest token."""
    decoded_token: str | None = None
    """Text of the token; None if the engine has no tokenizer."""
    bytes: bytes | None = None
    """Bytes of the token. In `decoded_token`, incomplete characters are replaced."""

    @classmethod
    def of(cls, logprob: float, rank: int, piece: builtins.bytes | None) -> Logprob:
        """Return the log-probability of the token whose bytes are `piece`."""
        text = None if piece is None else piece.decode(errors="replace")
        return cls(logprob, rank, text, piece)


Logprobs = dict[int, Logprob]
"""Log-probabilities by token id: first the token itself, then the likeliest tokens at its
position."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The part of a sequence that has already been emitted to its reader. Another engine continues
    the sequence after it."""

    token_ids: Sequence[int] = ()
    """Ids of the output tokens, from the first one."""
    characters: int = 0
    """Number of output characters that were emitted. The text of the last tokens may be missing,
    because an incomplete character or a possible start of a stop string is held back."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while the sequence is running."""
    stop_reason: int | str | None = None
    """Stop token or stop string that ended the sequence; None if an end-of-sequence token or
    something else ended it."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the output so far; None unless they were requested."""
    logprobs: list[Logprobs] | None = None
    """One entry for each of `token_ids`; None unless log-probabilities were requested."""
    text_offsets: list[int] | None = None
    """Number of output characters before each token; None unless log-probabilities were
    requested."""

    def finished(self) -> bool:
        """Return True if the sequence is finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """Start of the request's first step on the device; known only at the end."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Time of the latest token so far."""
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from arrival to the first token on the user's event loop; None before
        the first token."""
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
    """Number of prompt tokens found in the prefix cache; known only at the end."""
    num_preemptions: int = 0
    """Number of times that the sequence was preempted; known only at the end."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One entry for each prompt token; the first entry is None. The list itself is None if it was
    not requested, or if the request was aborted before the log-probabilities were computed. With
    output kind DELTA, only the first output has the list."""


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """A sequence found by a beam search."""

    tokens: list[int]
    """Prompt tokens, then output tokens, including the token that ended the sequence, if any."""
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    """For each output token, the likeliest tokens at its position, including the token itself."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the output tokens."""
    text: str | None = None
    """Text of `tokens`, including special tokens; None if the engine has no tokenizer."""
    finish_reason: str | None = None
    """Finish reason, "stop" or "length"."""
    stop_reason: int | None = None
    """Id of the token that ended the sequence; None if the length limit ended it."""


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search over one prompt."""

    sequences: list[BeamSearchSequence]
    """Sequences, best first: `beam_width` of them, or fewer if the vocabulary is too small for that
    many."""
