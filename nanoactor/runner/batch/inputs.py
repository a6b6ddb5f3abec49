"""The inputs of a step: NumPy arrays on the host, tensors on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32, Int64
from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores, TokenScores
from nanoactor.models.sampling.rows import LogitRules, SamplingGroups
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens

T = TypeVar("T")
Array = NDArray[Any]
Long = NDArray[np.int64]
NONE: Long = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill(Generic[T]):
    """Rows that are computed as chunks of tokens."""

    token_ids: T
    positions: T
    slots: T
    """(tokens,): the slot of each token."""
    rows: T
    """(4, rows): slot, first token, tokens, context at the end of the chunk."""
    tiles: T
    """(2, programs): row, and index of the group of its tokens."""
    ends: T
    """Tokens with hidden states that are read: those to sample from, those with states to keep,
    then one for each row that pools."""
    sampling: T
    """The slots of the tokens to sample from."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows(Generic[T]):
    """Rows that choose their tokens together, outside the fused sampler unless `fused`."""

    slots: T
    index: T
    """Index of each among the step's samplers, see `Update.positions`; its slot if it chooses from
    the state that the slot keeps."""
    groups: SamplingGroups[T]
    rules: LogitRules[T] | None = None
    masks: T | None = None
    """(rows, words): the ids that each may choose, a bit for each id."""
    fused: bool = False
    """True if the fused sampler handles all of them after masking."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRows(Generic[T]):
    """Tokens that get log-probabilities: of prompts first, then of samplers."""

    prompt_rows: T
    """Tokens of the step's chunks."""
    targets: T
    """The successor of each."""
    samplers: T
    """Indices of the step's samplers with tokens that are scored."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRows(Generic[T]):
    """Slots that keep the state of a row for a later choice."""

    prompts: T
    """Slots of the last of `Prefill.ends`."""
    continued: T
    """Slots of the last rows after the decode batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class SeenPictures(Generic[T]):
    """Visual embeddings for the tokens of a step's chunks."""

    rows: T
    """int32 (tokens,): row of the encoder cache for each token; -1 for text."""
    positions: T
    """int32 (3, tokens): rotary positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs(Generic[T]):
    """All arrays that a step takes to the device."""

    changes: tuple[T, ...]
    """Indices and values to be written into the state before anything runs, or nothing."""
    prefill: Prefill[T] | None
    fallback: tuple[SampledRows[T], ...]
    """Samplers that the fused sampler does not handle, a few at a time."""
    copies: tuple[T, ...] = ()
    """Blocks that are copied before the layers: sources and destinations, or nothing."""
    slot_copies: tuple[T, ...] = ()
    """Slots with states that are copied before the layers: sources and targets, or nothing. All
    sources are read before any target is written."""
    admitted: T | None = None
    """Slots with new sequences; their states are zeroed after these copies. None if layers keep no
    slot states."""
    kept: KeptRows[T] | None = None
    choices: tuple[SampledRows[T], ...] = ()
    """Rows that choose from the states that their slots keep, a few at a time."""
    scored: ScoredRows[T] | None = None
    seen: SeenPictures[T] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeTask:
    """Units of one item that a step encodes."""

    pixels: NDArray[np.uint8]
    """(frames, height, width, channels): of the whole item."""
    number: int
    """Number of the pixels, the key of partial encodings."""
    first: int
    count: int
    places: Int64
    """Rows of the encoder cache for all rows of the item."""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """The vision tower's work in a step."""

    tasks: tuple[EncodeTask, ...]
    dropped: tuple[int, ...] = ()
    """Numbers of pixels that no later step encodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRows:
    """The pooling rows of a step. Their states are the last of `Prefill.ends`; means use the states
    of all tokens of their chunks."""

    numbers: Int32
    """Indices of the step's rows."""
    firsts: tuple[int, ...]
    """First token of each, in the step's chunks; empty unless means are pooled."""
    counts: tuple[int, ...]
    """Number of tokens of each, likewise."""

    def message(self, values: NDArray[np.float32]) -> StepVectors:
        """Return the result of the step's rows."""
        return StepVectors(self.numbers, values)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredResults:
    """Layout of a step's scores on the host."""

    rows: Int32
    """The row of each sampler that is scored."""
    counts: Int32
    """Number of top tokens reported with each scored token."""

    @property
    def most(self) -> int:
        """The largest of `counts`."""
        return int(self.counts.max(initial=0))

    def message(self, table: Int32) -> StepScores:
        """Read the table that `nanoactor.models.sampling.token_scores.TokenScorer` returns."""
        most = (table.shape[1] - 2) // 2
        counts = np.minimum(self.counts, np.int32(most))
        told = np.arange(most) < counts[:, None]
        return StepScores(
            self.rows,
            TokenScores(
                logprobs=table[:, 0].copy().view(np.float32),
                ranks=table[:, 1].copy(),
                counts=counts,
                top_ids=table[:, 2 : 2 + most][told],
                top_logprobs=table[:, 2 + most :][told].view(np.float32),
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A step as it is launched. Its samplers are in this order: chunks and their copies, the decode
    batch, rows after it that sample, choices."""

    step: int
    inputs: Inputs[Array]
    positions: Long
    """For each sampler, the position of the token that it chooses."""
    decodes: int
    """Rows of the decode batch."""
    lengths: HostSeqLens
    """Lengths on the host, if the device needs them."""
    continued: int = 0
    """Number of rows after the decode batch, with their own position and token."""
    resumed: int = 0
    """Number of these that sample; they come first."""
    order: Long | None = None
    """The samplers in the order of the step's rows; None if that is their own."""
    counts: Int32 = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Counts by row, see `StepDone.counts`."""
    scored: ScoredResults | None = None
    pooled: PooledRows | None = None
    encoding: Encoding | None = None

    @property
    def prefill(self) -> Prefill[Array] | None:
        """The chunks of the step."""
        return self.inputs.prefill

    @property
    def decode_rows(self) -> int:
        """Return the number of rows that attend like the decode batch."""
        return self.decodes + self.continued

    @property
    def rows(self) -> int:
        """Return the number of tokens that go through the layers."""
        return self.decode_rows + (len(self.prefill.token_ids) if self.prefill else 0)

    @property
    def final_lengths(self) -> HostSeqLens | None:
        """Return the lengths of rows with hidden states that are read, as decode rows; None if
        other tokens' states are read too, or if these are hardly fewer."""
        if (prefill := self.prefill) is None or 2 * len(prefill.ends) > len(prefill.token_ids):
            return None
        if self.inputs.scored is not None and len(self.inputs.scored.prompt_rows):
            return None
        if self.pooled is not None and self.pooled.counts:
            return None
        if self.lengths is NO_SEQ_LENS:
            return NO_SEQ_LENS
        contexts = (prefill.positions[prefill.ends] + 1).tolist()
        return HostSeqLens([], [], contexts + self.lengths.decode_contexts)
