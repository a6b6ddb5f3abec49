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
NO_INDICES: Long = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill(Generic[T]):
    """Rows that are computed as chunks of tokens."""

    token_ids: T
    positions: T
    slots: T
    """Slot of each token, (tokens,)."""
    rows: T
    """(4, rows): slot, index of the first token, number of tokens, context length at the end of the
    chunk."""
    tiles: T
    """(2, programs): row, and index of the group of this row's tokens."""
    ends: T
    """Indices of the tokens whose hidden states are read: those to sample from, those whose states
    are kept, then one for each row that pools."""
    sampling: T
    """Slots of the tokens to sample from."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows(Generic[T]):
    """Rows that choose their tokens together, outside the fused sampler unless `fused`."""

    slots: T
    index: T
    """Index of each row among the step's samplers (see `Update.positions`), or its slot if it
    chooses from the state that the slot keeps."""
    groups: SamplingGroups[T]
    rules: LogitRules[T] | None = None
    masks: T | None = None
    """(rows, words): bit mask of the ids that each row may choose."""
    fused: bool = False
    """True if the fused sampler handles all rows after masking."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRows(Generic[T]):
    """Tokens whose log-probabilities are computed: prompt tokens first, then sampled tokens."""

    prompt_rows: T
    """Indices of the tokens in the step's chunks whose successors are scored."""
    targets: T
    """Id of the successor of each of `prompt_rows`."""
    samplers: T
    """Indices of the step's samplers whose tokens are scored."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRows(Generic[T]):
    """Slots that keep the state of a row for a later choice."""

    prompts: T
    """Slots that keep the state of a prompt's last token; the tokens are in `Prefill.ends`."""
    continued: T
    """Slots of the last rows after the decode batch, whose states are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisualInputs(Generic[T]):
    """Encoder cache rows and rotary positions of the tokens in a step's chunks."""

    rows: T
    """Encoder cache row of each token, int32 (tokens,); -1 for text."""
    positions: T
    """Rotary positions (time, height, width), int32 (3, tokens)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs(Generic[T]):
    """All arrays that a step copies to the device."""

    changes: tuple[T, ...]
    """Indices into the state array, and the values to write there before anything runs; empty if
    there are none."""
    prefill: Prefill[T] | None
    fallback: tuple[SampledRows[T], ...]
    """Samplers that the fused sampler does not handle, in parts of a few rows each."""
    copies: tuple[T, ...] = ()
    """Sources and targets of block copies that precede the layers; empty if there are none."""
    slot_copies: tuple[T, ...] = ()
    """Sources and targets of slot state copies that precede the layers; empty if there are none.
    All sources are read before any target is written."""
    admitted: T | None = None
    """Slots of new sequences, whose states are zeroed after these copies. None if there are none,
    or if layers keep no slot states."""
    kept: KeptRows[T] | None = None
    choices: tuple[SampledRows[T], ...] = ()
    """Rows that choose from the states that their slots keep, in parts of a few rows each."""
    scored: ScoredRows[T] | None = None
    visual: VisualInputs[T] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeTask:
    """The units of one item that a step encodes."""

    pixels: NDArray[np.uint8]
    """Pixels of the whole item, (frames, height, width, channels)."""
    number: int
    """Number that identifies the pixels; key of partial encodings."""
    first: int
    count: int
    cache_rows: Int64
    """Encoder cache rows for all rows of the item."""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """The vision tower's work in a step."""

    tasks: tuple[EncodeTask, ...]
    dropped: tuple[int, ...] = ()
    """Numbers that identify pixels which no later step encodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRows:
    """The pooling rows of a step. Their states are read at the last of `Prefill.ends`; means use
    the states of all tokens in their chunks."""

    numbers: Int32
    """Index of each pooling row among the step's rows."""
    firsts: tuple[int, ...]
    """Index of each row's first token in the step's chunks; empty unless means are pooled."""
    counts: tuple[int, ...]
    """Number of tokens in each row; empty unless mean pooling is used."""

    def message(self, values: NDArray[np.float32]) -> StepVectors:
        """Return the message with the results of these rows, (rows, width)."""
        return StepVectors(self.numbers, values)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredResults:
    """Layout of a step's scores on the host."""

    rows: Int32
    """Row index of each scored sampler."""
    counts: Int32
    """Number of top tokens reported with each scored token."""

    @property
    def max_logprobs(self) -> int:
        """Return the largest of `counts`; 0 if there are none."""
        return int(self.counts.max(initial=0))

    def message(self, table: Int32) -> StepScores:
        """Return the message for a table that `nanoactor.models.sampling.token_scores.TokenScorer`
        has returned."""
        num_logprobs = (table.shape[1] - 2) // 2
        counts = np.minimum(self.counts, np.int32(num_logprobs))
        is_reported = np.arange(num_logprobs) < counts[:, None]
        return StepScores(
            self.rows,
            TokenScores(
                logprobs=table[:, 0].copy().view(np.float32),
                ranks=table[:, 1].copy(),
                counts=counts,
                top_ids=table[:, 2 : 2 + num_logprobs][is_reported],
                top_logprobs=table[:, 2 + num_logprobs :][is_reported].view(np.float32),
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A step, ready to be launched. Its samplers are the rows that choose a token, in this order:
    chunks and their copies, the decode batch, rows after the decode batch, choices."""

    step: int
    inputs: Inputs[Array]
    positions: Long
    """For each sampler, the position of the token that it chooses."""
    decodes: int
    """Number of rows in the decode batch."""
    lengths: HostSeqLens
    """Sequence lengths, if the device needs them on the host."""
    continued: int = 0
    """Number of rows after the decode batch, each with its own position and token."""
    resumed: int = 0
    """Number of `continued` rows that sample; they come first."""
    order: Long | None = None
    """Indices that sort the samplers by the step's rows; None if they are in that order already."""
    counts: Int32 = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Number of tokens of each row; see `StepDone.counts`."""
    scored: ScoredResults | None = None
    pooled: PooledRows | None = None
    encoding: Encoding | None = None

    @property
    def prefill(self) -> Prefill[Array] | None:
        """Return the chunks of the step; None if there are none."""
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
        """Return the lengths, as decode rows, of the rows whose hidden states are read. None if the
        states of other tokens are read too, or if these rows are not much fewer than all tokens."""
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
