"""What one step runs on, as the model sees it. Rows are sequences: prefill rows, then decode."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nanoactor.models.lengths import HostLengths


@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's paged keys and values, each (blocks, block_size, kv_heads, head_dim), contiguous.

    Every number in it is finite, from the start on.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt: its queries attend to the cached prefix and to themselves."""

    first: int
    """Where its tokens begin in the step."""
    tokens: int
    context: int
    """Length of the sequence at the end of the chunk: the last query sees so many positions."""
    blocks: torch.Tensor
    """int64, the blocks that hold the context, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each token's key and value go, and what each row attends to."""

    slot_mapping: torch.Tensor
    """int64 (tokens,): block * block_size + offset of each token."""
    prefills: tuple[PrefillRow, ...]
    decode_first: int
    """Where the decode rows' tokens begin, one each, up to the end of the step."""
    decode_tables: torch.Tensor
    """int64 (decode rows, most blocks): past a row's context any block of the cache may stand."""
    decode_contexts: torch.Tensor
    """int64 (decode rows,): each row's length, its new token included."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentBatch:
    """The same where block tables stay on the device, indexed by slot: prefill tokens, then one
    token for each decode row. Captured steps see nothing of the host."""

    slot_mapping: torch.Tensor
    """int64 (tokens,)."""
    tables: torch.Tensor
    """int32 (slots, blocks of the longest sequence)."""
    prefill_tokens: int
    prefill_rows: torch.Tensor
    """int32 (4, rows): slot, first token, tokens, context at the end of the chunk."""
    prefill_tiles: torch.Tensor
    """int32 (2, programs): which tokens of which row a program of the kernel has."""
    decode_slots: torch.Tensor
    """int32 (decode rows,)."""
    decode_contexts: torch.Tensor
    """int32 (decode rows,): each row's length, its new token included."""
    lengths: HostLengths
    """What the host knows of the same, where the device asks for it."""
    scratch: Any
    """The device's own, which `Accelerator.plan` makes: what the attention of all layers shares."""


Batch = AttentionBatch | ResidentBatch


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTables:
    """What a device knows of each slot. The last slot is a dummy, for padded rows."""

    blocks: torch.Tensor
    """int32 (slots, blocks of the longest sequence)."""
    lengths: torch.Tensor
    """int32 (slots,): positions computed, those of steps under way included; so it is the position
    of the next token."""
    last_tokens: torch.Tensor
    """int32 (slots,)."""
    temperature: torch.Tensor
    """float32 (slots,): 0 for greedy."""
    top_k: torch.Tensor
    """int32 (slots,): 0 for no limit."""
    top_p: torch.Tensor
    """float32 (slots,)."""
    min_p: torch.Tensor
    """float32 (slots,)."""
    seeds: torch.Tensor
    """int32 (2, slots): low and high words."""
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowBuffers:
    """What `Accelerator.advance` fills in for each decode row."""

    token_ids: torch.Tensor
    """int32 (rows,)."""
    positions: torch.Tensor
    """int32 (rows,)."""
    slot_mapping: torch.Tensor
    """int64 (rows,)."""
    contexts: torch.Tensor
    """int32 (rows,)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose the rows' tokens; row indices are prepared on the host, so none is synced."""

    temperature: torch.Tensor
    """float32 (rows,)."""
    top_k: torch.Tensor
    """int64 (rows,): 0 for no limit."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    """int64 (rows,): the bits of an unsigned 64-bit seed."""
    positions: torch.Tensor
    """int64 (rows,): the position that the sampled token will have."""
    greedy: torch.Tensor
    """int64: the rows with temperature 0."""
    plain: torch.Tensor
    """int64: rows that sample from the whole vocabulary."""
    limited: torch.Tensor
    """int64: rows with a top-k of at most `limits.CANDIDATES`."""
    unlimited: torch.Tensor
    """int64: rows with another top-k."""
    nucleus: torch.Tensor
    """int64: rows with top-p or min-p alone."""
    masked_rows: torch.Tensor
    """int64: with `masked_ids`, logits that must not be chosen (`min_tokens`)."""
    masked_ids: torch.Tensor
