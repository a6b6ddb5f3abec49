"""The attention part of a layer, over the paged KV cache."""

from __future__ import annotations

import torch

from nanoactor.models.batch import HeadTransform, KVCache
from nanoactor.models.layers.kinds import AttentionSpec
from nanoactor.models.layers.linear import ColumnParallel, RowParallel, columns_of_rank
from nanoactor.models.layers.norm import norm_weight
from nanoactor.models.layers.state import LayerState, PagedKV
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.parallel import Span
from nanoactor.models.weights.linear import Part, Projection


class Attention:
    """The attention part of a layer: query, key and value projections, optional norms of query and
    key heads, rotation, cache write, attention, and output projection."""

    def __init__(self, spec: AttentionSpec, context: LayerContext, prefix: str) -> None:
        config, shard, name = context.config, context.shard, f"{prefix}.{spec.name}"
        self._heads, self._kv_heads = shard.heads.size, shard.kv_heads.size
        size = self._head_dim = config.head_dim
        self._device, self.scale = context.device, size**-0.5 if spec.scale is None else spec.scale
        self.is_plain = spec.scale is None and spec.rotary_dim is None
        """True if `LayerWeights` can describe this attention to operators that run a whole decode
        step."""
        inner = config.num_heads * size
        parts = (
            _separate_parts(context, name)
            if spec.qkv == "separate"
            else _fused_parts(spec, context, name)
        )
        self.qkv = ColumnParallel(
            context, Projection(parts, config.hidden_size, bias=spec.qkv_bias)
        )
        columns = columns_of_rank(inner, shard.heads.scaled(size))
        output_part = Part(f"{name}.o_proj", config.hidden_size)
        self.out = RowParallel(
            context, Projection((output_part,), inner, columns=columns, bias=spec.output_bias)
        )
        self.norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self._eps = config.rms_norm_eps
        if spec.qk_norm is not None:
            names = f"{name}.q_norm", f"{name}.k_norm"
            q, k = (norm_weight(spec.qk_norm, context, weight_name, size) for weight_name in names)
            self.norms, self._eps = (q, k), spec.qk_norm.eps
            self.is_plain &= self._eps == config.rms_norm_eps and not spec.qk_norm.in_float32
        self.input_operator = self.qkv.operator
        self.state = PagedKV(self._kv_heads, size, context.weights.dtype)

    def __call__(self, x: torch.Tensor, state: LayerState, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape, or to (final rows, hidden) if
        `step.final_rows` is set."""
        assert isinstance(state, KVCache)
        batch, final_rows = step.batch, step.final_rows
        heads = self.qkv(x).view(len(x), self._heads + 2 * self._kv_heads, self._head_dim)
        transform = HeadTransform(self.norms, self._eps, step.rotation)
        q = self._device.norm_rotate_store(heads, transform, state, batch.slot_mapping)
        if final_rows is not None:
            if not len(final_rows.indices):
                return x[:0]
            q, batch = q.index_select(0, final_rows.indices), final_rows.plan()
        output = self._device.attention(q, state, batch, self.scale, self.out.operator)
        return self.out(output.flatten(1))


def _separate_parts(context: LayerContext, name: str) -> tuple[Part, ...]:
    config, shard, size = context.config, context.shard, context.config.head_dim
    inner, kv = config.num_heads * size, config.num_kv_heads * size
    queries, keys = shard.heads.scaled(size), shard.kv_heads.scaled(size)
    return (
        Part(f"{name}.q_proj", inner, (queries,)),
        Part(f"{name}.k_proj", kv, (keys,)),
        Part(f"{name}.v_proj", kv, (keys,)),
    )


def _fused_parts(spec: AttentionSpec, context: LayerContext, name: str) -> tuple[Part, ...]:
    """Return the query, key and value projections as parts of the one tensor in which they are
    stored."""
    config, shard, size = context.config, context.shard, context.config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    outputs, group = (heads + 2 * kv_heads) * size, heads // kv_heads
    if spec.qkv == "stacked":
        queries = [shard.heads]
        keys, values = ([shard.kv_heads.shifted(heads + n * kv_heads)] for n in range(2))
    else:
        heads_per_group = group + 2  # heads of the tensor that belong to one key-value head
        rank_kv_heads = range(shard.kv_heads.start, shard.kv_heads.stop)
        query_spans = (
            Span(n * group, (n + 1) * group).intersection(shard.heads).shifted(2 * n)
            for n in rank_kv_heads
        )
        queries = list(query_spans)
        keys, values = (
            [Span(0, 1).shifted(n * heads_per_group + group + offset) for n in rank_kv_heads]
            for offset in range(2)
        )
    spans = (tuple(span.scaled(size) for span in part) for part in (queries, keys, values))
    return tuple(Part(f"{name}.qkv_proj", outputs, part) for part in spans)
