"""The inputs of a step, which are NumPy arrays on the host and tensors on the device."""

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
    """The rows of a step that are computed as chunks of several tokens."""

    token_ids: T
    positions: T
    slots: T
    """Slot (index in the batch) of each token's sequence, int32 (tokens,)."""
    rows: T
    """(4, rows): slot, index of the first token, number of tokens, and context length at the end of
    the chunk."""
    tiles: T
    """(2, programs): for each program of the attention kernel, its row and the index of its group
    of tokens within that row."""
    ends: T
    """Indices of the tokens whose hidden states are read: first those to sample from, then those
    whose states are kept, then one for each pooling row."""
    sampling: T
    """Slots of the tokens to sample from, in the order of `ends`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows(Generic[T]):
    """Rows whose tokens are sampled together, outside the fused sampler unless `fused` is True."""

    slots: T
    index: T
    """Index of each row in `Update.positions`, which lists all rows that choose a token. For a row
    that samples from the hidden state kept in its slot, the slot."""
    groups: SamplingGroups[T]
    rules: LogitRules[T] | None = None
    masks: T | None = None
    """Bit mask of the token ids that each row may sample, int32 (rows, words); None if all may
    be."""
    fused: bool = False
    """True if the fused sampler handles all of these rows after the masks are applied."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRows(Generic[T]):
    """Tokens whose log-probabilities are computed: first prompt tokens, then sampled tokens."""

    prompt_rows: T
    """Indices, in the step's chunks, of the tokens whose next tokens are scored."""
    targets: T
    """Id of the token that follows each of `prompt_rows`."""
    samplers: T
    """Indices, in `Update.positions`, of the sampled tokens that are scored."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRows(Generic[T]):
    """Slots (indices of sequences in the batch) in which hidden states are kept, so that a later
    step can sample from them."""

    prompts: T
    """Slots of the chunks whose last states are kept; the tokens are listed in `Prefill.ends`."""
    continued: T
    """Slots of the rows after the decode batch whose states are kept; these rows come last."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisualInputs(Generic[T]):
    """Encoder-cache rows and rotary positions of all tokens in a step's chunks."""

    rows: T
    """Encoder-cache row of each token, int32 (tokens,); -1 for text tokens."""
    positions: T
    """Rotary positions (temporal, height, width), int32 (3, tokens)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs(Generic[T]):
    """All arrays of a step that are copied to the device."""

    changes: tuple[T, ...]
    """(indices, values) to write to the array of all tables on the device, before anything else
    runs; empty if nothing changes."""
    prefill: Prefill[T] | None
    fallback: tuple[SampledRows[T], ...]
    """Rows to sample without the fused sampler, in parts of a few rows each."""
    copies: tuple[T, ...] = ()
    """(sources, targets) of block copies, made before the layers run; empty if there are none."""
    slot_copies: tuple[T, ...] = ()
    """(sources, targets) of copies of slot states, which layers keep for each sequence outside of
    blocks. The copies are made before the layers run; empty if there are none. All sources are read
    before any target is written."""
    admitted: T | None = None
    """Slots of new sequences, whose slot states are zeroed after the copies; None if there are none
    or if no layer keeps slot state."""
    kept: KeptRows[T] | None = None
    choices: tuple[SampledRows[T], ...] = ()
    """Rows that sample from the hidden states kept in their slots, in parts of a few rows each."""
    scored: ScoredRows[T] | None = None
    visual: VisualInputs[T] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeTask:
    """The part of an image or video that a step encodes."""

    pixels: NDArray[np.uint8]
    """Pixels of the whole image or video, uint8 (frames, height, width, channels)."""
    number: int
    """Number of the request for the pixels; identifies the image or video while it is only partly
    encoded."""
    first: int
    count: int
    cache_rows: Int64
    """Row of the encoder cache to which each output row of the image or video is written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """The work of the vision tower in a step."""

    tasks: tuple[EncodeTask, ...]
    dropped: tuple[int, ...] = ()
    """Numbers (`EncodeTask.number`) of images and videos that no later step encodes, so that their
    partial results can be freed."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledRows:
    """The pooling rows of a step. Their states are read at the tokens that come last in
    `Prefill.ends`; mean pooling instead uses the states of all tokens in their chunks."""

    numbers: Int32
    """Index of each pooling row among all rows of the step."""
    firsts: tuple[int, ...]
    """Index of each row's first token in the step's chunks; empty unless mean pooling is used."""
    counts: tuple[int, ...]
    """Number of tokens of each row; empty unless mean pooling is used."""

    def message(self, values: NDArray[np.float32]) -> StepVectors:
        """Return the message with the pooled `values` of these rows, (rows, width)."""
        return StepVectors(self.numbers, values)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredResults:
    """The layout of a step's log-probabilities on the host."""

    rows: Int32
    """Row index of each sampled token that is scored."""
    counts: Int32
    """Number of top tokens to report with each scored token."""

    @property
    def max_logprobs(self) -> int:
        """Largest number in `counts`; 0 if nothing is scored."""
        return int(self.counts.max(initial=0))

    def message(self, table: Int32) -> StepScores:
        """Convert a table returned by `nanoactor.models.sampling.token_scores.TokenScorer` to a
        message."""
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
    """A step that is ready to be launched.

    Its *samplers* are the rows that choose a token, in this order: chunks and their copies, the
    decode batch, rows after the decode batch, and choices (rows that sample from a kept state).
    """

    step: int
    inputs: Inputs[Array]
    positions: Long
    """Position of the token that each sampler chooses."""
    decodes: int
    """Number of rows in the decode batch."""
    lengths: HostSeqLens
    """Sequence lengths on the host, if the device needs them; otherwise `NO_SEQ_LENS`."""
    continued: int = 0
    """Number of rows after the decode batch; each has its own position and token."""
    resumed: int = 0
    """Number of rows after the decode batch that sample; they are the first of these rows."""
    order: Long | None = None
    """Indices that sort the samplers in the order of the step's rows; None if they are already
    sorted."""
    counts: Int32 = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Number of tokens that each row yields, 0 or 1; empty if each row yields one."""
    scored: ScoredResults | None = None
    pooled: PooledRows | None = None
    encoding: Encoding | None = None

    @property
    def prefill(self) -> Prefill[Array] | None:
        """The chunks of the step; None if there are none."""
        return self.inputs.prefill

    @property
    def decode_rows(self) -> int:
        """Number of rows that are computed like decode rows."""
        return self.decodes + self.continued

    @property
    def rows(self) -> int:
        """Number of tokens that pass through the layers."""
        return self.decode_rows + (len(self.prefill.token_ids) if self.prefill else 0)

    @property
    def final_lengths(self) -> HostSeqLens | None:
        """Lengths of the rows whose hidden states are read, as if they were decode rows. None if
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
