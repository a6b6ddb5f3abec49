"""The inputs of a model for one step (one forward pass). Each row is a sequence: prefill rows come
first, then decode rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nanoactor.models.sampling.columns import SamplingColumns, column_views
from nanoactor.models.sampling.rows import SamplingGroups
from nanoactor.models.seq_lens import HostSeqLens


@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """Paged keys and values of one layer, each a contiguous tensor (blocks, block_size, kv_heads,
    head_dim).

    All values are finite at all times, even right after allocation.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class HeadTransform:
    """Normalization and rotation of query and key heads, applied before the keys are stored."""

    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights of the query norm and the key norm, (head_dim,) each; None for models without these
    norms."""
    eps: float
    rotation: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines, as returned by `Operators.rotation`."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisualTokens:
    """The image placeholders among a step's prompt tokens, and the features that replace their
    embeddings."""

    mask: torch.Tensor
    """True for placeholders, bool (prompt tokens, 1)."""
    features: torch.Tensor
    """(prompt tokens, hidden * (1 + deepstack levels)): the embedding of each token, then one
    vector per deepstack level, which is added after one of the decoder's first layers. Zero for
    text tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention inputs of a step: the cache position of each token's key and value, and the context
    length of each row.

    Prefill tokens come first, then one token for each decode row. A slot is a sequence's index in
    the tables on the device, such as the block tables. Steps captured as graphs read nothing from
    the host.
    """

    slot_mapping: torch.Tensor
    """Cache position of each token (block * block_size + offset), int64 (tokens,)."""
    tables: torch.Tensor
    """Block table of each slot, int32 (slots, maximum number of blocks of a sequence)."""
    block_size: int
    prefill_tokens: int
    prefill_rows: torch.Tensor
    """int32 (4, rows): slot, index of the first token, number of tokens, and context length after
    this chunk. Captured steps are padded with rows of the dummy slot that have no tokens."""
    prefill_tiles: torch.Tensor
    """int32 (2, programs): for each program instance of the prefill attention kernel, its row and
    the index of its group of tokens within that row."""
    decode_slots: torch.Tensor
    """Slot of each decode row, int32 (decode rows,)."""
    decode_contexts: torch.Tensor
    """Context length of each decode row, including its new token, int32 (decode rows,)."""
    lengths: HostSeqLens
    """Context lengths as known to the host, for devices that need them there. For frozen rows (see
    `frozen`), which no longer grow, they are upper bounds."""
    plan: Any = None
    """State that the attention of all layers shares, created by the device's
    `BatchOperators.plan`."""
    visual: VisualTokens | None = None
    frozen: torch.Tensor | None = None
    """int32 (slots,): 1 if decode rows of the slot must not change its state, because its sequence
    sampled a token that stops decoding. The keys and values of such rows already go to the dummy
    slot's block. None means that no slot is frozen."""
    final_rows: FinalRows | None = None
    """Tokens whose final hidden states are needed; None if all of them are."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinalRows:
    """Tokens whose hidden states are read after the last layer.

    The last layer stores the keys and values of all tokens, but computes everything else only for
    these tokens.
    """

    indices: torch.Tensor
    """Indices of these tokens, int32 (rows,). Those of the decode rows come last."""
    plan: Callable[[], AttentionBatch]
    """Function that returns the batch in which each of these tokens is a decode row. It is called
    after all other layers have run, because the plans (`AttentionBatch.plan`) of one step may share
    memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardInputs:
    """All inputs of a model's forward pass for one step."""

    token_ids: torch.Tensor
    """int32 (tokens,)."""
    positions: torch.Tensor
    """Rotary positions: (tokens,), or (3, tokens) if some tokens belong to images."""
    states: Sequence[Any]
    """State of each layer (`nanoactor.models.layers.state.LayerState`), which the pass updates in
    place."""
    batch: AttentionBatch


@dataclasses.dataclass(frozen=True, slots=True)
class FusedSamplingInputs:
    """Inputs of a device's fused sampler, which samples each row with the parameters of its slot
    (the sequence's index in `tables`)."""

    logits: torch.Tensor
    """(rows, vocabulary), or (slots, vocabulary) if logits are stored by slot."""
    slots: torch.Tensor
    """Slot of each row, int32 (rows,)."""
    tables: SlotTables
    scratch: Any
    """Workspace returned by `BatchOperators.scratch`."""
    sampled_ids: torch.Tensor
    """Output buffer for the sampled token ids, int32 (rows,)."""


def decode_batch(
    buffers: RowBuffers,
    slots: torch.Tensor,
    tables: SlotTables,
    no_prefills: torch.Tensor,
    lengths: HostSeqLens,
) -> AttentionBatch:
    """Return a batch of decode rows only, one for each of `slots` (sequence indices), int32
    (rows,).

    `buffers` contains the inputs of these rows. `no_prefills` is an empty tensor, int32 (4, 0).
    """
    return AttentionBatch(
        buffers.slot_mapping,
        tables.blocks,
        tables.block_size,
        prefill_tokens=0,
        prefill_rows=no_prefills,
        prefill_tiles=no_prefills[:2],
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
    """Return `batch` with `final_rows`, the tokens whose final hidden states are needed: some
    prompt tokens, followed by all decode rows.

    `chunks` contains the indices of these prompt tokens, int32 (rows,), and the slots (sequence
    indices) and positions of all prefill tokens, int32 (prefill tokens,) each. `lengths` are the
    lengths of the final rows, if the device needs them on the host. `plan` prepares attention for
    the batch of the final rows.
    """
    final_indices, slots, positions = chunks
    first_decode, tokens = batch.prefill_tokens, len(batch.slot_mapping)
    decode_indices = torch.arange(
        first_decode, tokens, dtype=final_indices.dtype, device=final_indices.device
    )
    final_batch = dataclasses.replace(
        batch,
        prefill_tokens=0,
        prefill_rows=batch.prefill_rows[:, :0],
        prefill_tiles=batch.prefill_tiles[:, :0],
        decode_slots=torch.cat((slots.index_select(0, final_indices), batch.decode_slots)),
        decode_contexts=torch.cat(
            (positions.index_select(0, final_indices) + 1, batch.decode_contexts)
        ),
        lengths=lengths,
    )
    final = FinalRows(
        torch.cat((final_indices, decode_indices)), functools.partial(plan, final_batch)
    )
    return dataclasses.replace(batch, final_rows=final)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTables:
    """State of each slot (a sequence's index), kept on the device. The last slot is a dummy for
    padding rows."""

    blocks: torch.Tensor
    """Block table of each slot, int32 (slots, maximum number of blocks of a sequence)."""
    lengths: torch.Tensor
    """Number of computed positions of each slot, including those of steps in flight, int32
    (slots,). This is also the position of the next token."""
    last_tokens: torch.Tensor
    """Newest token id of each slot, int32 (slots,)."""
    rope_deltas: torch.Tensor | None
    """Rotary position of the next token minus its position in the sequence, int32 (slots,). None if
    the model accepts no images, as the two are then always equal."""
    sampling_words: torch.Tensor
    """Packed sampling parameters of each slot, int32 (words of a request, slots)."""
    block_size: int
    frozen: torch.Tensor
    """int32 (slots,): 1 if the slot's newest token is one of its `freeze_ids`. Decode rows of such
    a slot change neither its cache nor its length; a last token that they leave is never used."""
    freeze_ids: torch.Tensor
    """Token ids that freeze each slot when they are sampled, int32 (limits.MAX_FREEZE_IDS, slots),
    padded with -1."""
    sampling: SamplingColumns[torch.Tensor] = dataclasses.field(init=False)
    """Views of `sampling_words` by parameter, (slots,) each; the seeds are (2, slots)."""

    def __post_init__(self) -> None:
        """Create the views of `sampling_words` by parameter."""
        object.__setattr__(self, "sampling", column_views(self.sampling_words, torch.float32))


class DecodeRows(NamedTuple):
    """Decode rows, of one token each. All fields are int32 (rows,)."""

    slots: torch.Tensor
    positions: torch.Tensor
    """Position that each row computes, or -1 for the next position of its slot."""
    token_ids: torch.Tensor
    """Token id of each row. Ignored where the position is -1: such a row uses its slot's newest
    token."""

    def first(self, rows: int) -> DecodeRows:
        """Return a view of the first `rows` rows."""
        return DecodeRows(*(column[:rows] for column in self))


@dataclasses.dataclass(frozen=True, slots=True)
class RowBuffers:
    """Buffers that `BatchOperators.advance` fills with the inputs of the decode rows."""

    token_ids: torch.Tensor
    """Token ids, int32 (rows,)."""
    positions: torch.Tensor
    """Rotary positions, int32 (rows,)."""
    slot_mapping: torch.Tensor
    """Cache positions of the new keys and values, int64 (rows,)."""
    contexts: torch.Tensor
    """Context lengths including the new token, int32 (rows,)."""

    @classmethod
    def zeros(cls, zeros: Callable[..., torch.Tensor], tokens: int, rows: int) -> RowBuffers:
        """Return buffers for `tokens` tokens and `rows` decode rows, allocated with a device's
        `zeros`."""
        ids, positions = (zeros(tokens, dtype=torch.int32) for _ in range(2))
        return cls(ids, positions, zeros(tokens, dtype=torch.int64), zeros(rows, dtype=torch.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the rows of a step."""

    sampling: SamplingColumns[torch.Tensor]
    """Sampling parameters, (rows,) each; the seeds are (2, rows)."""
    positions: torch.Tensor
    """Position of the token that is sampled, int64 (rows,)."""
    groups: SamplingGroups[torch.Tensor]

    @classmethod
    def of(
        cls, tables: SlotTables, slots: torch.Tensor, groups: SamplingGroups[torch.Tensor]
    ) -> SamplingBatch:
        """Return the sampling parameters of `slots` (sequence indices), int64 (rows,), read from
        `tables`."""
        words = tables.sampling_words.index_select(1, slots)
        positions = tables.lengths.index_select(0, slots).long()
        return cls(column_views(words, torch.float32), positions, groups)

    @property
    def seeds(self) -> torch.Tensor:
        """The unsigned 64-bit seeds, reinterpreted as int64 (rows,)."""
        low, high = self.sampling.seed.long().unbind()
        return (low & 0xFFFFFFFF) | (high << 32)
