"""The inputs of one step, as the model sees them. Rows are sequences: prefill rows, then decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nanoactor.models.sampling.columns import SamplingColumns, columns_of
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.seq_lens import HostSeqLens


@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's paged keys and values, each (blocks, block_size, kv_heads, head_dim), contiguous.

    Every number in it is finite, from the start on.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class HeadTransform:
    """Transformation of query and key heads before keys are stored."""

    norms: tuple[torch.Tensor, torch.Tensor] | None
    """The weights of both norms, (head_dim,) each; None where heads are not normed."""
    eps: float
    rotation: tuple[torch.Tensor, torch.Tensor]
    """As `Operators.rotation` prepares it."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisualTokens:
    """The placeholder tokens of pictures at the start of a step, and their features."""

    seen: torch.Tensor
    """Mask of visual tokens, bool (tokens, 1)."""
    features: torch.Tensor
    """(tokens, hidden * (1 + deepstack levels)): the embedding, then the summand after each of
    the first layers; 0 for text."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The place of each token's key and value, and each row's context: prefill tokens, then one
    token for each decode row. Block tables stay on the device, indexed by slot. Captured steps
    read nothing from the host."""

    slot_mapping: torch.Tensor
    """int64 (tokens,): block * block_size + offset of each token."""
    tables: torch.Tensor
    """int32 (slots, blocks of the longest sequence)."""
    block_size: int
    prefill_tokens: int
    prefill_rows: torch.Tensor
    """int32 (4, rows): slot, first token, tokens, context at the end of the chunk. Captured steps
    are padded with rows of the dummy's slot that have no tokens."""
    prefill_tiles: torch.Tensor
    """int32 (2, programs): the row and the tokens of each of the kernel's programs."""
    decode_slots: torch.Tensor
    """Slots of the decode rows, int32 (decode rows,)."""
    decode_contexts: torch.Tensor
    """int32 (decode rows,): each row's length, its new token included."""
    lengths: HostSeqLens
    """The same lengths as far as the host knows them, if the device needs them; frozen rows are
    shorter than it assumes."""
    plan: Any = None
    """State shared by the attention of all layers, created by `BatchOperators.plan` of this
    device."""
    visual: VisualTokens | None = None
    frozen: torch.Tensor | None = None
    """int32 (slots,): 1 if a decode row must not change its slot's state. Its key and value are
    already directed to the dummy slot's block. None: no slot is frozen."""
    final: FinalRows | None = None
    """None if the hidden states of all tokens are needed."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinalRows:
    """Tokens whose hidden states are read after the last layer. That layer stores the keys and
    values of all tokens, and computes the rest for these alone."""

    index: torch.Tensor
    """int32 (rows,): token indices, those of the decode rows last."""
    plan: Callable[[], AttentionBatch]
    """Makes the batch in which each of them is a decode row; called after all other layers, since
    plans of one step may share memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardInputs:
    """All that a model's forward pass reads."""

    token_ids: torch.Tensor
    """Token ids, (tokens,)."""
    positions: torch.Tensor
    """(tokens,): rotary; (3, tokens) if some tokens belong to pictures."""
    states: Sequence[Any]
    """State of each layer, a `nanoactor.models.layers.state.LayerState`; updated in place."""
    batch: AttentionBatch


@dataclasses.dataclass(frozen=True, slots=True)
class RowChoice:
    """Rows for which a device chooses tokens by the sampling parameters of their slots."""

    logits: torch.Tensor
    """(rows, vocabulary); (slots, vocabulary) if they are kept."""
    slots: torch.Tensor
    """Slots, int32 (rows,)."""
    tables: SlotTables
    scratch: Any
    """Workspace from `BatchOperators.scratch`."""
    chosen: torch.Tensor
    """int32 (rows,): output for the ids."""


def decode_batch(
    buffers: RowBuffers,
    slots: torch.Tensor,
    tables: SlotTables,
    nothing: torch.Tensor,
    lengths: HostSeqLens,
) -> AttentionBatch:
    """Return the batch of decode rows alone, of slots int32 (rows,); `nothing` is int32 (4, 0)."""
    return AttentionBatch(
        buffers.slot_mapping,
        tables.blocks,
        tables.block_size,
        prefill_tokens=0,
        prefill_rows=nothing,
        prefill_tiles=nothing[:2],
        decode_slots=slots,
        decode_contexts=buffers.contexts,
        lengths=lengths,
        frozen=tables.frozen,
    )


def with_final_rows(
    batch: AttentionBatch,
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: HostSeqLens,
    plan: Callable[[AttentionBatch], AttentionBatch],
) -> AttentionBatch:
    """Return the batch with final rows: tokens of the chunks, then all decode rows.

    `chunks`: the token indices, int32 (rows,), and the slots and positions of all prefill tokens,
    int32 (prefill tokens,). `lengths` are those of the rows, if the device needs them.
    """
    ends, slots, positions = chunks
    first, tokens = batch.prefill_tokens, len(batch.slot_mapping)
    decodes = torch.arange(first, tokens, dtype=ends.dtype, device=ends.device)
    rows = dataclasses.replace(
        batch,
        prefill_tokens=0,
        prefill_rows=batch.prefill_rows[:, :0],
        prefill_tiles=batch.prefill_tiles[:, :0],
        decode_slots=torch.cat((slots.index_select(0, ends), batch.decode_slots)),
        decode_contexts=torch.cat((positions.index_select(0, ends) + 1, batch.decode_contexts)),
        lengths=lengths,
    )
    final = FinalRows(torch.cat((ends, decodes)), functools.partial(plan, rows))
    return dataclasses.replace(batch, final=final)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTables:
    """The device's state of each slot. The last slot is a dummy, for padded rows."""

    blocks: torch.Tensor
    """int32 (slots, blocks of the longest sequence)."""
    lengths: torch.Tensor
    """int32 (slots,): positions computed, including those of steps in flight: the position of the
    next token."""
    last_tokens: torch.Tensor
    """Newest token of each slot, int32 (slots,)."""
    rope_deltas: torch.Tensor | None
    """int32 (slots,): rotary position of the next token, less its position in the sequence; None
    if the model takes no pictures, so that they do not differ."""
    words: torch.Tensor
    """int32 (columns.WORDS, slots): how each slot samples."""
    block_size: int
    frozen: torch.Tensor
    """int32 (slots,): 1 for a slot with one of its `freeze_ids` as its newest token. Decode rows of
    such a slot change no lasting state."""
    freeze_ids: torch.Tensor
    """Tokens that freeze a slot, int32 (limits.FREEZE_IDS, slots), padded with -1."""
    sampling: SamplingColumns[torch.Tensor] = dataclasses.field(init=False)
    """The words by column, (slots,) each."""

    def __post_init__(self) -> None:
        """Create the views of `words` by column."""
        object.__setattr__(self, "sampling", columns_of(self.words, torch.float32))


class DecodeRows(NamedTuple):
    """Rows of one token each; all fields are int32 (rows,)."""

    slots: torch.Tensor
    positions: torch.Tensor
    """Position that each row computes, or -1 for the next of its slot."""
    token_ids: torch.Tensor
    """Token of each row with a position; rows at -1 take their slot's newest token."""

    def first(self, rows: int) -> DecodeRows:
        """Return the first `rows` rows."""
        return DecodeRows(*(column[:rows] for column in self))


@dataclasses.dataclass(frozen=True, slots=True)
class RowBuffers:
    """Buffers that `BatchOperators.advance` fills in for each decode row."""

    token_ids: torch.Tensor
    """Token ids, int32 (rows,)."""
    positions: torch.Tensor
    """Rotary positions, int32 (rows,)."""
    slot_mapping: torch.Tensor
    """Cache slots of new keys and values, int64 (rows,)."""
    contexts: torch.Tensor
    """Context lengths, int32 (rows,)."""

    @classmethod
    def zeros(cls, zeros: Callable[..., torch.Tensor], tokens: int, rows: int) -> RowBuffers:
        """Allocate buffers for `tokens` tokens and `rows` decode rows with a device's `zeros`."""
        ids, positions = (zeros(tokens, dtype=torch.int32) for _ in range(2))
        return cls(ids, positions, zeros(tokens, dtype=torch.int64), zeros(rows, dtype=torch.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of a step's rows."""

    sampling: SamplingColumns[torch.Tensor]
    """Sampling parameters, (rows,) each."""
    positions: torch.Tensor
    """int64 (rows,): the position that the sampled token will have."""
    groups: SamplingGroups[torch.Tensor]

    @classmethod
    def of(
        cls, tables: SlotTables, slots: torch.Tensor, groups: SamplingGroups[torch.Tensor]
    ) -> SamplingBatch:
        """Return the rows of these slots, int64 (rows,), from the device's tables."""
        words = tables.words.index_select(1, slots)
        positions = tables.lengths.index_select(0, slots).long()
        return cls(columns_of(words, torch.float32), positions, groups)

    @property
    def seeds(self) -> torch.Tensor:
        """Return the bits of the unsigned 64-bit seeds, int64 (rows,)."""
        low, high = self.sampling.seed.long().unbind()
        return (low & 0xFFFFFFFF) | (high << 32)
