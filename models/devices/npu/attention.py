"""Fused attention over the paged cache, in two query layouts, as documents disagree on which one a
chip supports: packed tokens (TND), or a padded batch (BNSD)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

import torch

from nanoactor.models.batch import KVCache
from nanoactor.models.seq_lens import HostSeqLens

MASK_SIZE = 2048
_CAUSAL = 3
"""sparse_mode: the last query sees every position, the one before all but one, ..."""
_DENSE = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The part of attention that all layers of a step share."""

    tables: torch.Tensor
    """int32 (rows, blocks of the longest sequence)."""
    mask: torch.Tensor
    """Causal mask, int8 (MASK_SIZE, MASK_SIZE)."""
    query_ends: list[int] | torch.Tensor
    """Cumulative end of each row's tokens; a tensor if contexts are one."""
    prefill_tokens: list[int]
    contexts: list[int] | torch.Tensor
    """Length of each row, new tokens included; an int64 tensor in graphs with operators for it."""
    there: torch.Tensor | None = None
    """Token at each place of a padded batch of prompts, int64 (rows * longest,)."""
    back: torch.Tensor | None = None
    """Place of each token's result, int64 (tokens,)."""

    @property
    def decode_contexts(self) -> list[int] | torch.Tensor:
        """Return the contexts of the rows after the prompts."""
        return self.contexts[len(self.prefill_tokens) :]


class Attention(Protocol):
    """Layout of attention inputs."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Plan what layers share; `rows` int32 (4, prompts) has each chunk's first token and
        number of tokens in its second and third line."""

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Map (tokens, heads, head_dim), contiguous, to the same."""


def make_attention(layout: str) -> Attention:
    """Return the layout of this name, from the user's options."""
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
    **rest: Any,
) -> torch.Tensor:
    """Call the operator, with keys and values as (blocks, block_size, kv_heads * head_dim)."""
    blocks, size, kv_heads, _ = cache.keys.shape
    operator = torch.ops.npu.npu_fused_infer_attention_score
    if isinstance(contexts, torch.Tensor):
        # The form for compiled graphs; it exists once torchair is imported.
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
        **rest,
    )[0]
    return output


class Packed:
    """One call for all rows of any kind."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Plan only the ends of the rows."""
        return _make_plan(tables, lengths, mask)

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Attend in the TND layout."""
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
    """One call for the prompts, padded on the right to the longest, and one for the rest."""

    def plan(
        self, tables: torch.Tensor, lengths: HostSeqLens, rows: torch.Tensor, mask: torch.Tensor
    ) -> Plan:
        """Plan the padding of the prompts as well."""
        plan, tokens = _make_plan(tables, lengths, mask), lengths.prefill_tokens
        if len(tokens) < 2:
            return plan
        longest, device = max(tokens), tables.device
        firsts, counts = rows[1].long(), rows[2].long()
        places = torch.arange(longest, device=device)
        there = firsts[:, None] + torch.minimum(places[None], counts[:, None] - 1)
        numbers = torch.arange(len(tokens), device=device)
        row_of = torch.repeat_interleave(numbers, counts, output_size=sum(tokens))
        offsets = torch.arange(sum(tokens), device=device) - firsts.index_select(0, row_of)
        return dataclasses.replace(plan, there=there.flatten(), back=row_of * longest + offsets)

    def __call__(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Attend in the BNSD layout."""
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
        attended = _attend(
            queries[:, :, None],
            cache,
            tables,
            plan.decode_contexts,
            scale,
            heads,
            input_layout="BNSD",
            sparse_mode=_DENSE,
        )
        return attended[:, :, 0]

    def _prefill(
        self, queries: torch.Tensor, cache: KVCache, plan: Plan, scale: float
    ) -> torch.Tensor:
        prompts, longest = len(plan.prefill_tokens), max(plan.prefill_tokens)
        heads, size = queries.shape[1:]
        if plan.there is not None:
            queries = queries.index_select(0, plan.there)
        padded = queries.view(prompts, longest, heads, size).transpose(1, 2).contiguous()
        attended = _attend(
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
        flat = attended.transpose(1, 2).reshape(prompts * longest, heads, size)
        return flat if plan.back is None else flat.index_select(0, plan.back)
