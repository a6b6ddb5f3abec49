"""Fused attention over the paged cache, in two query layouts: packed tokens (TND) and a padded
batch (BNSD).

Both exist because CANN's documentation is inconsistent about which one a chip supports.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.seq_lens import HostSeqLens

MASK_SIZE = 2048
_CAUSAL = 3
"""Value of `sparse_mode` for a causal mask aligned to the last query. The last query sees every
position, the query before it sees all but the last position, and so on."""
_DENSE = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """State that the attention of all layers of a step shares."""

    tables: torch.Tensor
    """Block tables of the step's rows, int32 (rows, blocks of the longest sequence)."""
    mask: torch.Tensor
    """Causal mask, int8 (MASK_SIZE, MASK_SIZE)."""
    query_ends: list[int] | torch.Tensor
    """End of each row's tokens in the batch, as a cumulative count. A tensor if `contexts` is
    one."""
    prefill_tokens: list[int]
    contexts: list[int] | torch.Tensor
    """Context length of each row including its new tokens. An int64 tensor in graphs whose
    operators accept tensors as lengths."""
    pad_indices: torch.Tensor | None = None
    """Index of the token at each position of the padded batch of prompts, int64 (prompts *
    longest,). None if there are fewer than two prompts, as nothing is padded then."""
    unpad_indices: torch.Tensor | None = None
    """Index of each prompt token's result in the padded batch, int64 (tokens,). None if
    `pad_indices` is None."""

    @property
    def decode_contexts(self) -> list[int] | torch.Tensor:
        """Context lengths of the decode rows."""
        return self.contexts[len(self.prefill_tokens) :]


class Attention(Protocol):
    """Fused attention in one query layout."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Return the state that the attention of all layers shares.

        `tables`, int32 (rows, blocks), are the block tables of the step's rows. `rows`, int32 (4,
        prompts), is `AttentionBatch.prefill_rows`: its second line contains the first token of each
        prompt chunk, and its third line the number of tokens.
        """

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Return the attention output of `queries`, (tokens, heads, head_dim), in the same shape.
        `queries` must be contiguous."""


def make_attention(layout: str) -> Attention:
    """Return the attention for a layout name from the user's options: "tnd" or "bnsd"."""
    layouts: dict[str, type[Packed] | type[Padded]] = {"tnd": Packed, "bnsd": Padded}
    return layouts[layout]()


def _make_plan(tables: torch.Tensor, lengths: HostSeqLens, mask: torch.Tensor) -> Plan:
    tokens = lengths.prefill_tokens + [1] * len(lengths.decode_contexts)
    ends = [*itertools.accumulate(tokens)]
    contexts = lengths.prefill_contexts + lengths.decode_contexts
    return Plan(tables, mask, ends, lengths.prefill_tokens, contexts)


def _attend(
    queries: torch.Tensor,
    cache: KVCache,
    tables: torch.Tensor,
    contexts: list[int] | torch.Tensor,
    scale: float,
    heads: int,
    **options: Any,
) -> torch.Tensor:
    """Call the fused operator with keys and values viewed as (blocks, block_size, kv_heads *
    head_dim)."""
    blocks, size, kv_heads, _ = cache.keys.shape
    operator = torch.ops.npu.npu_fused_infer_attention_score
    if isinstance(contexts, torch.Tensor):
        # The variant for compiled graphs, which is registered once torchair is imported.
        operator = torch.ops.air.npu_fused_infer_attention_score
    output: torch.Tensor = operator(
        queries,
        cache.keys.view(blocks, size, -1),
        cache.values.view(blocks, size, -1),
        block_table=tables,
        block_size=size,
        actual_seq_lengths_kv=contexts,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scale,
        **options,
    )[0]
    return output


class Packed:
    """Attention in the TND layout, with one call for all prefill and decode rows."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Return the state that all layers share. This layout needs no padding indices."""
        return _make_plan(tables, lengths, mask)

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Return the attention output of all rows, in one call."""
        if not len(queries):
            return queries
        return _attend(
            queries,
            cache,
            plan.tables,
            plan.contexts,
            scale,
            queries.shape[1],
            input_layout="TND",
            actual_seq_lengths=plan.query_ends,
            atten_mask=plan.mask,
            sparse_mode=_CAUSAL,
        )


class Padded:
    """Attention in the BNSD layout. Prompts, which are padded on the right to the longest one, and
    decode rows are processed by separate calls."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Return the state that all layers share. If there are several prompts, it includes the
        indices that pad the prompts and gather their results."""
        plan, tokens = _make_plan(tables, lengths, mask), lengths.prefill_tokens
        if len(tokens) < 2:
            return plan
        longest, device = max(tokens), tables.device
        firsts, counts = rows[1].long(), rows[2].long()
        positions_in_row = torch.arange(longest, device=device)
        pad_indices = firsts[:, None] + torch.minimum(positions_in_row[None], counts[:, None] - 1)
        numbers = torch.arange(len(tokens), device=device)
        row_of = torch.repeat_interleave(numbers, counts, output_size=sum(tokens))
        offsets = torch.arange(sum(tokens), device=device) - firsts.index_select(0, row_of)
        return dataclasses.replace(
            plan, pad_indices=pad_indices.flatten(), unpad_indices=row_of * longest + offsets
        )

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Return the attention output of all rows, with one call each for prompts and decode
        rows."""
        prompts, first = len(plan.prefill_tokens), sum(plan.prefill_tokens)
        parts = []
        if prompts:
            parts.append(self._prefill(queries[:first], cache, plan, scale))
        if len(queries) > first:
            parts.append(self._decode(queries[first:], cache, plan, scale))
        return torch.cat(parts) if len(parts) > 1 else [*parts, queries][0]

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        tables = plan.tables[len(plan.prefill_tokens) :]
        heads = queries.shape[1]
        output = _attend(
            queries[:, :, None],
            cache,
            tables,
            plan.decode_contexts,
            scale,
            heads,
            input_layout="BNSD",
            sparse_mode=_DENSE,
        )
        return output[:, :, 0]

    def _prefill(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        prompts, longest = len(plan.prefill_tokens), max(plan.prefill_tokens)
        heads, size = queries.shape[1:]
        if plan.pad_indices is not None:
            queries = queries.index_select(0, plan.pad_indices)
        padded = queries.view(prompts, longest, heads, size).transpose(1, 2).contiguous()
        output = _attend(
            padded,
            cache,
            plan.tables[:prompts],
            plan.contexts[:prompts],
            scale,
            heads,
            input_layout="BNSD",
            actual_seq_lengths=plan.prefill_tokens,
            atten_mask=plan.mask,
            sparse_mode=_CAUSAL,
        )
        flat = output.transpose(1, 2).reshape(prompts * longest, heads, size)
        return flat if plan.unpad_indices is None else flat.index_select(0, plan.unpad_indices)
