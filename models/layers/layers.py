"""The layers that decoder models are made of. A layer takes its weights when it is made."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, FinalRows, KVCache
from nanoactor.models.collective import Group
from nanoactor.models.config import ModelConfig
from nanoactor.models.devices.protocols import Device, Linear
from nanoactor.models.parallel import Shard, Span
from nanoactor.models.weights.checkpoint import Weights
from nanoactor.models.weights.whole_step import LayerWeights

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContext:
    """All that a layer is made from."""

    config: ModelConfig
    weights: Weights
    device: Device
    shard: Shard
    group: Group


class ColumnParallel:
    """y = x Wᵀ + b, of which each rank computes the outputs of its own.

    Several projections of the same input are fused into one.
    """

    def __init__(
        self,
        context: LayerContext,
        names: list[str],
        inputs: int,
        outputs: list[int],
        rows: list[Span],
        bias: bool = False,
    ) -> None:
        """`outputs` are those of the whole layer, `rows` this rank's part of each."""
        weights = context.weights
        names_w, names_b = [f"{n}.weight" for n in names], [f"{n}.bias" for n in names]
        weight = weights.concatenated(names_w, outputs, inputs, rows=rows)
        added = weights.concatenated(names_b, outputs, rows=rows) if bias else None
        self.operator = context.device.linear(weight, added)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, inputs) to (tokens, this rank's outputs)."""
        return self.operator(x)


class RowParallel:
    """y = x Wᵀ + b, of which each rank has a part of the inputs; the products are summed."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        inputs: int,
        columns: Span,
        outputs: int,
        bias: bool = False,
    ) -> None:
        weights, group = context.weights, context.group
        whole = columns.size == inputs
        weight = weights.load(f"{name}.weight", outputs, inputs, columns=None if whole else columns)
        self._group = group
        added = weights.load(f"{name}.bias", outputs) if bias else None
        self.operator = context.device.linear(weight, added if group.size == 1 else None)
        self._bias = added if group.size > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, this rank's inputs) to (tokens, outputs)."""
        y = self._group.all_reduce(self.operator(x))
        return y if self._bias is None else y + self._bias


class Embedding:
    """Rows of a table, of which each rank has those of its token ids."""

    def __init__(
        self, weights: Weights, name: str, shard: Shard, config: ModelConfig, group: Group
    ) -> None:
        rows = shard.vocabulary if group.size > 1 else None
        self.weight = weights.load(name, config.vocab_size, config.hidden_size, rows=rows)
        self._start, self._group = shard.vocabulary.start, group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) to (tokens, hidden)."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._start
        foreign = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._group.all_reduce(x.masked_fill(foreign[:, None], 0.0))


class RMSNorm:
    """Root mean square normalisation, optionally with the residual sum before it."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, device: Device) -> None:
        self.weight = weights.load(f"{name}.weight", size)
        self._eps = eps
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x over its last dimension."""
        return self._device.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return self._device.add_rms_norm(x, residual, self.weight, self._eps)


class Attention:
    """Project, norm each head (where the family does), rotate, remember, attend, project back."""

    def __init__(self, context: LayerContext, prefix: str) -> None:
        config, weights, shard = context.config, context.weights, context.shard
        self._heads, self._kv_heads = shard.heads.size, shard.kv_heads.size
        size = self._head_dim = config.head_dim
        self._device = context.device
        hidden, inner = config.hidden_size, config.num_heads * size
        kv = config.num_kv_heads * size
        qkv = [f"{prefix}.{name}_proj" for name in "qkv"]
        rows = [shard.heads.times(size), shard.kv_heads.times(size), shard.kv_heads.times(size)]
        self.qkv = ColumnParallel(context, qkv, hidden, [inner, kv, kv], rows, bias=config.qkv_bias)
        self.out = RowParallel(
            context,
            f"{prefix}.o_proj",
            inner,
            shard.heads.times(size),
            hidden,
            bias=config.output_bias,
        )
        self.norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            names = [f"{prefix}.{name}_norm.weight" for name in "qk"]
            self.norms = weights.load(names[0], size), weights.load(names[1], size)
        self._eps = config.rms_norm_eps

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        cache: KVCache,
        batch: AttentionBatch,
        final: FinalRows | None,
    ) -> torch.Tensor:
        """(tokens, hidden) to the same, or to (final rows, hidden)."""
        heads = self.qkv(x).view(len(x), self._heads + 2 * self._kv_heads, self._head_dim)
        q = self._device.norm_rotate_store(
            heads, self.norms, self._eps, rotation, cache, batch.slot_mapping
        )
        if final is not None:
            if not len(final.index):
                return x[:0]
            q, batch = q.index_select(0, final.index), final.plan()
        attended = self._device.attention(q, cache, batch, self._head_dim**-0.5)
        return self.out(attended.flatten(1))


class MLP:
    """Gate and up in one multiplication, SwiGLU, down."""

    def __init__(self, context: LayerContext, prefix: str) -> None:
        config, mine = context.config, context.shard.inner
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = ColumnParallel(
            context, names, hidden, [inner, inner], [mine, mine], bias=bias
        )
        self.down = RowParallel(context, f"{prefix}.down_proj", inner, mine, hidden, bias=bias)
        self._device = context.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        return self.down(self._device.swiglu(self.gate_up(x)))


class DecoderLayer:
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, context: LayerContext, prefix: str) -> None:
        size, eps = context.config.hidden_size, context.config.rms_norm_eps
        weights, device = context.weights, context.device
        self._input_norm = RMSNorm(weights, f"{prefix}.input_layernorm", size, eps, device)
        self._attention = Attention(context, f"{prefix}.self_attn")
        self._post_norm = RMSNorm(weights, f"{prefix}.post_attention_layernorm", size, eps, device)
        self._mlp = MLP(context, f"{prefix}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        cache: KVCache,
        batch: AttentionBatch,
        final: FinalRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer's contribution, the residual stream without it), of the final rows alone
        where there are some."""
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x = self._attention(x, rotation, cache, batch, final)
        if final is not None:
            residual = residual.index_select(0, final.index)
            if not len(x):
                return x, residual
        x, residual = self._post_norm.add(x, residual)
        return self._mlp(x), residual

    def weights(self) -> LayerWeights | None:
        """Its tensors; None where these are not all: the device keeps matrices in a layout of its
        own, or there are biases that `LayerWeights` has no place for."""
        attention, mlp = self._attention, self._mlp
        found = [layer.operator for layer in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
        matrices = [each.weight for each in found if isinstance(each, Linear)]
        if len(matrices) < len(found):
            return None
        if any(isinstance(each, Linear) and each.bias is not None for each in found[1:]):
            return None
        qkv, o, gate_up, down = matrices
        q_norm, k_norm = attention.norms or (None, None)
        bias = found[0].bias if isinstance(found[0], Linear) else None
        norm1, norm2 = self._input_norm.weight, self._post_norm.weight
        return LayerWeights(
            norm1=norm1,
            qkv=qkv,
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            o=o,
            norm2=norm2,
            gate_up=gate_up,
            down=down,
        )
