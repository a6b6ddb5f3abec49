"""Qwen3, dense: a pre-norm decoder with grouped-query attention and normed queries and keys."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.collective import Alone, Group
from nanoactor.models.config import ModelConfig
from nanoactor.models.device import Device
from nanoactor.models.layers import ColumnParallel, Embedding, RMSNorm, RowParallel
from nanoactor.models.parallel import Shard, shard_of
from nanoactor.models.rope import RotaryEmbedding
from nanoactor.models.weights import Weights

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What every layer is made from."""

    config: ModelConfig
    weights: Weights
    device: Device
    shard: Shard
    group: Group


class Attention:
    """Project, norm each head, rotate, remember, attend, project back."""

    def __init__(self, parts: Parts, prefix: str) -> None:
        config, weights, device, shard = parts.config, parts.weights, parts.device, parts.shard
        self._heads, self._kv_heads = shard.heads.size, shard.kv_heads.size
        size = self._head_dim = config.head_dim
        self._device = device
        hidden, inner = config.hidden_size, config.num_heads * size
        kv, bias = config.num_kv_heads * size, config.attention_bias
        qkv = [f"{prefix}.{name}_proj" for name in "qkv"]
        rows = [shard.heads.times(size), shard.kv_heads.times(size), shard.kv_heads.times(size)]
        self._qkv = ColumnParallel(weights, qkv, hidden, [inner, kv, kv], rows, device, bias)
        self._out = RowParallel(
            weights,
            f"{prefix}.o_proj",
            inner,
            shard.heads.times(size),
            hidden,
            device,
            parts.group,
            bias,
        )
        names = [f"{prefix}.{name}_norm.weight" for name in "qk"]
        self._norms = weights.take(names[0], size), weights.take(names[1], size)
        self._eps = config.rms_norm_eps

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        heads = self._qkv(x).view(len(x), self._heads + 2 * self._kv_heads, self._head_dim)
        q = self._device.norm_rotate_store(
            heads, self._norms, self._eps, rotation, cache, batch.slot_mapping
        )
        attended = self._device.attention(q, cache, batch, self._head_dim**-0.5)
        return self._out(attended.flatten(1))


class MLP:
    """Gate and up in one multiplication, SwiGLU, down."""

    def __init__(self, parts: Parts, prefix: str) -> None:
        config, weights, device, mine = parts.config, parts.weights, parts.device, parts.shard.inner
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = ColumnParallel(weights, names, hidden, [inner, inner], [mine, mine], device)
        self._down = RowParallel(
            weights, f"{prefix}.down_proj", inner, mine, hidden, device, parts.group
        )
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        return self._down(self._device.swiglu(self._gate_up(x)))


class DecoderLayer:
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, parts: Parts, prefix: str) -> None:
        size, eps = parts.config.hidden_size, parts.config.rms_norm_eps
        weights, device = parts.weights, parts.device
        self._input_norm = RMSNorm(weights, f"{prefix}.input_layernorm", size, eps, device)
        self._attention = Attention(parts, f"{prefix}.self_attn")
        self._post_norm = RMSNorm(weights, f"{prefix}.post_attention_layernorm", size, eps, device)
        self._mlp = MLP(parts, f"{prefix}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer's contribution, the residual stream without it)."""
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x = self._attention(x, rotation, cache, batch)
        x, residual = self._post_norm.add(x, residual)
        return self._mlp(x), residual


class Qwen3ForCausalLM:
    """Embedding, layers, final norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: Device,
        max_positions: int,
        group: Group | None = None,
    ) -> None:
        """Takes all weights, or one rank's part; raises `WeightsError` for the first that does not
        fit."""
        self.group = group or Alone()
        self.config = config
        self._device = device
        self.max_positions = max_positions
        self.shard = shard_of(config, self.group.rank, self.group.size)
        parts = Parts(config, weights, device, self.shard, self.group)
        self._embedding = Embedding(
            weights, "model.embed_tokens.weight", self.shard, config, self.group
        )
        self._layers = [
            DecoderLayer(parts, f"model.layers.{index}") for index in range(config.num_layers)
        ]
        size = config.hidden_size
        self._norm = RMSNorm(weights, "model.norm", size, config.rms_norm_eps, device)
        self._head = device.linear(self._head_weight(weights), None)
        rope = RotaryEmbedding(config.rope, config.head_dim, max_positions)
        self._rope = rope.to(weights.device, weights.dtype)

    def _head_weight(self, weights: Weights) -> torch.Tensor:
        if self.config.tie_embeddings:
            return self._embedding.weight
        rows = self.shard.vocabulary if self.group.size > 1 else None
        shape = self.config.vocab_size, self.config.hidden_size
        return weights.take("lm_head.weight", *shape, rows=rows)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden) of ids and positions (tokens,); writes the caches."""
        x = self._embedding(token_ids)
        rotation = self._device.rotation(*self._rope(positions))
        residual = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, rotation, cache, batch)
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) to (rows, vocabulary), or to this rank's part of it, padding included."""
        return self._head(hidden)
