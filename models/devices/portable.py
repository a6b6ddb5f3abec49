"""Operators in plain PyTorch for any device that PyTorch supports. They are also the reference for
the operators of other devices."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F

from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    ForwardInputs,
    FusedSamplingInputs,
    HeadTransform,
    KVCache,
    RowBuffers,
    SamplingBatch,
    SlotTables,
)
from nanoactor.models.devices.protocols import (
    CapturedFunction,
    CapturedStep,
    Consumer,
    ExpertsOperator,
    ForwardFunction,
    Linear,
    LinearOperator,
    WholeSteps,
)
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.sampling.sampler import sample
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.linear import (
    ExpertWeights,
    LinearWeights,
    Router,
    dense_experts_of,
    dense_of,
)
from nanoactor.models.weights.whole_step import ModelWeights


class HostEvent:
    """An event of a device that does all work in the calling thread."""

    def __init__(self) -> None:
        self._at = 0

    def record(self) -> None:
        """Record the current time."""
        self._at = time.monotonic_ns()

    def wait(self) -> None:
        """Return at once, because all work is already done."""

    def milliseconds_until(self, later: HostEvent) -> float:
        """Return the time from this event to `later` in milliseconds, by the host's monotonic
        clock."""
        return (later._at - self._at) * 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk of one prompt. Its queries attend to the cached prefix and to the chunk itself."""

    first: int
    """Index of the chunk's first token among the step's tokens."""
    tokens: int
    context: int
    """Length of the sequence including the chunk. The last query attends to all of it."""
    blocks: torch.Tensor
    """Numbers of the blocks that contain the context, in order, int32 (blocks,)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PortablePlan:
    """State that the attention of all layers of a step shares."""

    prefills: tuple[PrefillRow, ...]
    decodes: Any
    """Result of `_plan_decodes`, or None if there are no decode rows."""


class PortableOperators:
    """The part of a device that does not depend on the hardware: `Operators`, `BatchOperators`, and
    steps that run operator by operator."""

    torch_device: torch.device

    # -- the queue and the batch ----------------------------------------------------------

    def stream(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the current stream and disables gradients."""
        return torch.inference_mode()

    def run(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Run the forward pass operator by operator and return the hidden states."""
        return forward(inputs)

    def capture(
        self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int
    ) -> CapturedStep:
        """Raise `RuntimeError`, because this device does not capture steps."""
        raise RuntimeError("this device runs steps operator by operator and does not capture them")

    def whole_steps(
        self, config: ModelConfig, weights: ModelWeights, sizes: Sequence[int], block_size: int
    ) -> WholeSteps | None:
        """Return None, because this device has no operator for whole steps."""
        return None

    def dummy_blocks(self, rows: int, block_size: int) -> int:
        """Return 1. All padding rows may write to the same cache position."""
        return 1

    def tokens_per_program(self, heads: int, kv_heads: int) -> int:
        """Return a number above the length of any prompt, because prompts are not divided among
        programs."""
        return 1 << 30

    def scratch(self, rows: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Any:
        """Return None, because the operators allocate their workspace themselves."""

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Compute the inputs of all decode rows with small operators. None of them reads anything
        back to the host."""
        self._advance(tables, rows, buffers, ids)

    def _advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the inputs of all decode rows. Return the slot (index of the block table) to
        which each row writes, int32 (rows,).

        Rows of frozen slots (stopped by one of their `freeze_ids`) write to the last slot, which is
        a dummy.
        """
        slots, continues = rows.slots, rows.positions < 0
        if not len(slots):
            return slots
        lengths = tables.lengths.index_select(0, slots)
        last_tokens = tables.last_tokens.index_select(0, slots)
        torch.where(continues, lengths, rows.positions, out=buffers.positions)
        torch.where(continues, last_tokens, rows.token_ids, out=buffers.token_ids)
        torch.add(buffers.positions, 1, out=buffers.contexts)
        frozen = (tables.freeze_ids.index_select(1, slots) == last_tokens).any(0)
        frozen = continues & (frozen | (tables.frozen.index_select(0, slots) > 0))
        target_slots = torch.where(frozen, len(tables.lengths) - 1, slots)
        positions = torch.where(frozen, 0, buffers.positions)
        self.fill_slot_mapping(tables, target_slots, positions, buffers.slot_mapping)
        ids.index_copy_(0, buffers.slot_mapping, buffers.token_ids)
        slot_indices = slots.long()
        tables.frozen.index_copy_(0, slot_indices, frozen.int())
        tables.lengths.index_copy_(0, slot_indices, lengths + (continues ^ frozen))
        if tables.rope_deltas is not None:
            buffers.positions.add_(tables.rope_deltas.index_select(0, slots))
        tables.lengths[-1:].zero_()  # the dummy slot keeps length 0
        return target_slots

    def fill_slot_mapping(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Fill `slot_mapping` with the cache position of each token, block * block_size +
        offset."""
        size, width = tables.block_size, tables.blocks.shape[1]
        table_indices = slots * width + torch.div(positions, size, rounding_mode="floor")
        blocks = tables.blocks.view(-1).index_select(0, table_indices)
        slot_mapping.copy_(blocks.long() * size + positions % size)

    def plan(self, scratch: Any, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with a plan that contains the cache blocks of each row. The number of
        blocks follows from the lengths that the host knows."""
        lengths, size = batch.lengths, batch.block_size
        prefills, first = [], 0
        if lengths.prefill_tokens:
            tables = batch.tables.index_select(0, batch.prefill_rows[0])
            for row, (tokens, context) in enumerate(
                zip(lengths.prefill_tokens, lengths.prefill_contexts, strict=True)
            ):
                blocks = tables[row, : -(-context // size)]
                prefills.append(PrefillRow(first, tokens, context, blocks))
                first += tokens
        decodes = self._plan_decodes(batch) if lengths.decode_contexts else None
        return dataclasses.replace(batch, plan=PortablePlan(tuple(prefills), decodes))

    def _plan_decodes(self, batch: AttentionBatch) -> Any:
        """Return the block tables of the decode rows, int32 (rows, blocks of the longest row).
        Entries after the end of a row are arbitrary."""
        max_blocks = -(-max(batch.lengths.decode_contexts) // batch.block_size)
        return batch.tables[:, :max_blocks].index_select(0, batch.decode_slots)

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Do nothing, because this device has no fused sampling."""

    def sample_masked_rows(self, inputs: FusedSamplingInputs, masks: torch.Tensor) -> None:
        """Raise `NotImplementedError`, because this device does not store logits by slot."""
        raise NotImplementedError(f"{type(self).__name__} does not keep logits")

    def publish(self, ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
        """Raise `NotImplementedError`, because this device's ids are copied to the host instead."""
        raise NotImplementedError(f"{type(self).__name__} does not publish token ids")

    # -- operators ------------------------------------------------------------------------

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Do nothing, because PyTorch's operators support every configuration."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a linear operator with these weights, which are unpacked if they are not dense."""
        dense = dense_of(weights)
        return Linear(dense.weight, dense.bias)

    def mlp(self, gate_up: LinearOperator, down: LinearOperator) -> LinearOperator:
        """Return a function that runs the two projections and `swiglu` one after the other."""
        return lambda x: down(self.swiglu(gate_up(x)))

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights of each token's experts, computed in float32 with a stable
        sort."""
        probabilities = F.linear(x.float(), router.weight).softmax(-1)
        topk_weights, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        topk_weights, ids = topk_weights[:, : router.top_k], ids[:, : router.top_k]
        if router.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return ids.int().contiguous(), topk_weights.to(x.dtype).float().contiguous()

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return a function that runs a layer's experts, one after the other.

        Weights are unpacked when the function is created. The number of tokens per expert is read
        back to the host.
        """
        dense = dense_experts_of(weights)
        gates_and_ups, downs = (
            [Linear(matrix, None) for matrix in matrices]
            for matrices in (dense.gate_up, dense.down)
        )
        return self.sequential_experts(gates_and_ups, downs)

    def sequential_experts(
        self, gates_and_ups: Iterable[LinearOperator], downs: Iterable[LinearOperator]
    ) -> ExpertsOperator:
        """Return a function that runs a layer's experts, one after the other. The arguments are the
        gate-and-up projection and the down projection of each expert."""
        gate_up_operators, down_operators = [*gates_and_ups], [*downs]

        def operator(
            x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            top_k = ids.shape[1]
            order = ids.flatten().long().argsort(stable=True)
            counts = ids.flatten().long().bincount(minlength=len(down_operators)).tolist()
            y = x.new_empty(len(order), x.shape[1])
            for expert, rows in enumerate(torch.split(order, counts)):
                if len(rows):
                    y[rows] = down_operators[expert](
                        self.swiglu(gate_up_operators[expert](x[rows // top_k]))
                    )
            weighted = y.view(-1, top_k, x.shape[1]).float() * topk_weights[..., None]
            return weighted.sum(1).to(x.dtype)

        return operator

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
    ) -> torch.Tensor:
        """Return the RMS norm of `x`, computed in float32 as in transformers and rounded to the
        dtype of `x`."""
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
        if weight.dtype == x.dtype:
            return weight * normed.to(x.dtype)
        return (weight * normed).to(x.dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: Consumer = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of x + residual, x + residual). The sum is rounded to the dtype of `x`
        before it is normalized, as in transformers."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `x` with a rotary embedding applied to the pairs of dimensions (i, i + pairs)."""
        pairs, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        first, second = pairs.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines unchanged."""
        return cos, sin

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return SiLU(gate) * up, where `gate_up` is (..., 2 * inner) with the gates first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values in the cache. Non-finite numbers are stored as 0."""
        for cached, new in ((cache.keys, keys), (cache.values, values)):
            finite = torch.nan_to_num(new, 0.0, 0.0, 0.0)
            cached.view(-1, *cached.shape[2:]).index_copy_(0, slot_mapping, finite)

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        transform: HeadTransform,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and return the
        queries. Each part is a separate operator."""
        kv_heads = cache.keys.shape[2]
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if transform.norms is not None:
            q, k = (
                self.rms_norm(x, w, transform.eps)
                for x, w in zip((q, k), transform.norms, strict=True)
            )
        q, k = self.rotary(q, *transform.rotation), self.rotary(k, *transform.rotation)
        self.write_kv(k, v, cache, slot_mapping)
        return q

    def attention(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        consumer: Consumer = None,
    ) -> torch.Tensor:
        """Return the attention output of all rows. Prefill rows are computed one at a time, and
        decode rows all together, over padded block tables."""
        plan: PortablePlan = batch.plan
        output = torch.empty_like(queries)
        for row in plan.prefills:
            tokens = slice(row.first, row.first + row.tokens)
            output[tokens] = self._prefill(queries[tokens], cache, row, scale)
        if plan.decodes is not None:
            tokens = slice(batch.prefill_tokens, None)
            output[tokens] = self._decode(queries[tokens], cache, batch, scale)
        return output

    def _prefill(
        self, queries: torch.Tensor, cache: KVCache, row: PrefillRow, scale: float
    ) -> torch.Tensor:
        keys = cache.keys.index_select(0, row.blocks).flatten(0, 1)[: row.context].transpose(0, 1)
        values = cache.values.index_select(0, row.blocks).flatten(0, 1)
        values = values[: row.context].transpose(0, 1)
        mask = None
        is_whole_prompt = row.tokens == row.context
        if not is_whole_prompt and row.tokens > 1:
            # Query i is at position context - tokens + i and sees all positions up to its own.
            mask = torch.ones(row.tokens, row.context, dtype=torch.bool, device=queries.device)
            mask = mask.tril(row.context - row.tokens)
        output = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=is_whole_prompt,
            scale=scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        tables: torch.Tensor = batch.plan.decodes
        keys = cache.keys[tables].flatten(1, 2).transpose(1, 2)
        values = cache.values[tables].flatten(1, 2).transpose(1, 2)
        positions = torch.arange(keys.shape[2], device=queries.device)
        mask = positions[None] < batch.decode_contexts[:, None]
        output = F.scaled_dot_product_attention(
            queries[:, :, None],
            keys,
            values,
            attn_mask=mask[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        return output[:, :, 0]

    def segment_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[int]
    ) -> torch.Tensor:
        """Return attention within each segment. Consecutive segments of equal length are computed
        together."""
        parts, start = [], 0
        for length, equal in itertools.groupby(segments):
            count = len(list(equal))
            span = slice(start, start + count * length)
            shape = count, length, *q.shape[1:]
            views = [part[span].reshape(shape).transpose(1, 2) for part in (q, k, v)]
            output = F.scaled_dot_product_attention(views[0], views[1], views[2])
            parts.append(output.transpose(1, 2).flatten(0, 1))
            start = span.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return sampled token ids, int64 (rows,), from `nanoactor.models.sampling.sampler`."""
        return sample(logits, batch)
