"""Decode attention on the CPU: rows are grouped so that little is padded and little is called."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, KVCache

# What a further group must save. To gather and attend once more takes about 25 us a layer, and in
# that time one core of an AMD EPYC with AVX-512 gathers and attends to so many bytes.
_CALL_BYTES = 256 << 10
# What is gathered should still be in the core's second-level cache when it is attended to.
_CACHE_BYTES = 2 << 20


class DecodePlan:
    """The groups of a step's decode rows: made by its first layer, for all of them."""

    def __init__(self, batch: AttentionBatch) -> None:
        # By the host's own figures: to ask a tensor for each group's longest costs more.
        self._contexts = batch.lengths.decode_contexts
        self._tables = batch.tables.index_select(0, batch.decode_slots)
        self._block_size = batch.block_size
        self._groups: list[DecodeGroup] = []

    def groups(self, cache: KVCache) -> list[DecodeGroup]:
        """The groups, longest rows first."""
        if not self._groups:
            blocks = [-(-context // self._block_size) for context in self._contexts]
            block_bytes = 2 * cache.keys[0].nbytes
            parts = group_rows(blocks, _CALL_BYTES // block_bytes, _CACHE_BYTES // block_bytes)
            self._groups = [self._group(rows, cache.keys.dtype) for rows in parts]
        return self._groups

    def _group(self, rows: list[int], dtype: torch.dtype) -> DecodeGroup:
        longest = max(self._contexts[row] for row in rows)
        blocks = -(-longest // self._block_size)
        if len(rows) == 1:
            return DecodeGroup(self._part(rows), self._tables[rows[0], :blocks], None, longest)
        contexts = torch.tensor([self._contexts[row] for row in rows])
        past = torch.arange(longest) >= contexts[:, None]
        mask = torch.zeros(past.shape, dtype=dtype).masked_fill_(past, float("-inf"))
        part = self._part(rows)
        tables = self._tables if part is None else self._tables[part]
        return DecodeGroup(part, tables[:, :blocks].flatten(), mask[:, None, None], longest)

    def _part(self, rows: list[int]) -> torch.Tensor | None:
        return None if len(rows) == len(self._contexts) else torch.tensor(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Some rows, the blocks of their contexts padded to the longest, and what is padding."""

    rows: torch.Tensor | None
    """None where it is all of them, in their order."""
    blocks: torch.Tensor
    mask: torch.Tensor | None
    """(rows, 1, 1, positions): 0, or minus infinity where a row has no such position; None where
    all have the same."""
    longest: int
    """Positions."""


def group_rows(blocks: list[int], worth: int, most: int) -> list[list[int]]:
    """Split rows of so many blocks each into groups that are padded to their longest.

    A group ends where its padding would exceed `worth` blocks, for a call costs as much as that,
    or all of it `most`. Rows in a single group keep their order; else they go from the longest to
    the shortest.
    """
    order = sorted(range(len(blocks)), key=lambda row: -blocks[row])
    groups: list[list[int]] = []
    longest = padding = 0
    for row in order:
        padding += longest - blocks[row]
        if not groups or padding > worth or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
            longest, padding = blocks[row], 0
        groups[-1].append(row)
    return groups if len(groups) > 1 else [sorted(groups[0])]


class DecodeAttention:
    """Gathers a group's keys and values, and lets PyTorch attend to them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: DecodePlan, scale: float
    ) -> torch.Tensor:
        """(rows, heads, head_dim) to the same. The query heads that share a KV head stand as
        positions of one query, so that keys and values are read once."""
        rows, heads, size = queries.shape
        kv_heads = cache.keys.shape[2]
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size)
        groups = plan.groups(cache)
        if len(groups) == 1:
            return self._attend(grouped, cache, groups[0], scale).reshape(rows, heads, size)
        output = torch.empty_like(grouped)
        for group in groups:
            output[group.rows] = self._attend(grouped[group.rows], cache, group, scale)
        return output.view(rows, heads, size)

    def _attend(
        self, queries: torch.Tensor, cache: KVCache, group: DecodeGroup, scale: float
    ) -> torch.Tensor:
        keys, values = self._gather(cache, group)
        attended: torch.Tensor = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, scale=scale
        )
        return attended

    def _gather(self, cache: KVCache, group: DecodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, kv_heads, positions, head_dim) of both."""
        count = len(group.blocks)
        rows = 1 if group.mask is None else len(group.mask)
        _, _, kv_heads, size = cache.keys.shape
        gathered = []
        for stored, buffer in zip(
            (cache.keys, cache.values), self._buffer(cache, count), strict=True
        ):
            part = buffer[:count]
            torch.index_select(stored, 0, group.blocks, out=part)
            shaped = part.view(rows, -1, kv_heads, size)[:, : group.longest]
            gathered.append(shaped.transpose(1, 2))
        return gathered[0], gathered[1]

    def _buffer(self, cache: KVCache, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for so many blocks, kept: fresh ones would fault every page in anew."""
        like = cache.keys
        found = self._buffers.get(like.dtype)
        if found is None or len(found[0]) < blocks or found[0].shape[1:] != like.shape[1:]:
            shape = (1 << (blocks - 1).bit_length(), *like.shape[1:])
            found = torch.empty(shape, dtype=like.dtype), torch.empty(shape, dtype=like.dtype)
            self._buffers[like.dtype] = found
        return found
