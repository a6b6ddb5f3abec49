"""Qwen3, dense: a pre-norm decoder with grouped-query attention and normed queries and keys."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.config import ModelConfig
from nanoactor.models.device import Device
from nanoactor.models.layers import Linear, RMSNorm
from nanoactor.models.rope import RotaryEmbedding
from nanoactor.models.weights import Weights

Rotation = tuple[torch.Tensor, torch.Tensor]


class Attention:
    """Project, norm each head, rotate, remember, attend, project back."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, device: Device) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._device = device
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        qkv = [f"{prefix}.{name}_proj" for name in "qkv"]
        bias = config.attention_bias
        self._qkv = Linear(weights, qkv, hidden, [inner, kv, kv], device, bias)
        self._out = Linear(weights, [f"{prefix}.o_proj"], inner, [hidden], device, bias)
        eps = config.rms_norm_eps
        self._q_norm = RMSNorm(weights, f"{prefix}.q_norm", config.head_dim, eps, device)
        self._k_norm = RMSNorm(weights, f"{prefix}.k_norm", config.head_dim, eps, device)

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        heads = self._qkv(x).view(len(x), self._heads + 2 * self._kv_heads, self._head_dim)
        q, k, v = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        q = self._device.rotary(self._q_norm(q), *rotation)
        k = self._device.rotary(self._k_norm(k), *rotation)
        self._device.write_kv(k, v, cache, batch.slot_mapping)
        attended = self._device.attention(q, cache, batch, self._head_dim**-0.5)
        return self._out(attended.flatten(1))


class MLP:
    """Gate and up in one multiplication, SwiGLU, down."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, device: Device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = Linear(weights, names, hidden, [inner, inner], device)
        self._down = Linear(weights, [f"{prefix}.down_proj"], inner, [hidden], device)
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to the same."""
        return self._down(self._device.swiglu(self._gate_up(x)))


class DecoderLayer:
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, device: Device) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._input_norm = RMSNorm(weights, f"{prefix}.input_layernorm", size, eps, device)
        self._attention = Attention(config, weights, f"{prefix}.self_attn", device)
        self._post_norm = RMSNorm(weights, f"{prefix}.post_attention_layernorm", size, eps, device)
        self._mlp = MLP(config, weights, f"{prefix}.mlp", device)

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
        self, config: ModelConfig, weights: Weights, device: Device, max_positions: int
    ) -> None:
        """Takes all weights; raises `WeightsError` for the first that does not fit."""
        size = config.hidden_size
        self.config = config
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, size)
        self._layers = [
            DecoderLayer(config, weights, f"model.layers.{index}", device)
            for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights, "model.norm", size, config.rms_norm_eps, device)
        tied = config.tie_embeddings
        head = self._embedding if tied else weights.take("lm_head.weight", config.vocab_size, size)
        self._head = device.linear(head, None)
        rope = RotaryEmbedding(config.rope, config.head_dim, max_positions)
        self._rope = rope.to(weights.device, weights.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden) of ids and positions (tokens,); writes the caches."""
        x = F.embedding(token_ids, self._embedding)
        rotation = self._rope(positions)
        residual = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, rotation, cache, batch)
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) to (rows, vocabulary)."""
        return self._head(hidden)
