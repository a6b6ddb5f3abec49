"""The operators in plain PyTorch: they run wherever PyTorch does, and are what is compared with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, Batch, KVCache, PrefillRow, SamplingBatch
from nanoactor.models.device import LinearOperator
from nanoactor.models.sampling import sample


class PortableOperators:
    """The operator half of the device protocol."""

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """They take everything."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOperator:
        """The weight as it is."""
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise in float32, as transformers does, and return the type of x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum is rounded to the type of x before it is normalised, as in transformers."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate each pair (i, i + head_dim / 2)."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As they are."""
        return cos, sin

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slots: torch.Tensor
    ) -> None:
        """Scatter rows into the cache."""
        for stored, new in ((cache.keys, keys), (cache.values, values)):
            finite = torch.nan_to_num(new, 0.0, 0.0, 0.0)
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, finite)

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """One operator after the other."""
        kv_heads = cache.keys.shape[2]
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        q = self.rotary(self.rms_norm(q, weights[0], eps), *rotation)
        k = self.rotary(self.rms_norm(k, weights[1], eps), *rotation)
        self.write_kv(k, v, cache, slots)
        return q

    def attention(
        self, queries: torch.Tensor, cache: KVCache, batch: Batch, scale: float
    ) -> torch.Tensor:
        """Prefill rows one by one, decode rows together over gathered, padded blocks."""
        assert isinstance(batch, AttentionBatch)
        output = torch.empty_like(queries)
        for row in batch.prefills:
            tokens = slice(row.first, row.first + row.tokens)
            output[tokens] = self._prefill(queries[tokens], cache, row, scale)
        if batch.decode_contexts.numel():
            tokens = slice(batch.decode_first, None)
            output[tokens] = self._decode(queries[tokens], cache, batch, scale)
        return output

    def _prefill(
        self, queries: torch.Tensor, cache: KVCache, row: PrefillRow, scale: float
    ) -> torch.Tensor:
        keys = cache.keys.index_select(0, row.blocks).flatten(0, 1)[: row.context].transpose(0, 1)
        values = cache.values.index_select(0, row.blocks).flatten(0, 1)
        values = values[: row.context].transpose(0, 1)
        mask = None
        whole = row.tokens == row.context
        if not whole and row.tokens > 1:
            # Query i sits at position context - tokens + i and sees everything up to there.
            mask = torch.ones(row.tokens, row.context, dtype=torch.bool, device=queries.device)
            mask = mask.tril(row.context - row.tokens)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        keys = cache.keys[batch.decode_tables].flatten(1, 2).transpose(1, 2)
        values = cache.values[batch.decode_tables].flatten(1, 2).transpose(1, 2)
        positions = torch.arange(keys.shape[2], device=queries.device)
        mask = positions[None] < batch.decode_contexts[:, None]
        attended = F.scaled_dot_product_attention(
            queries[:, :, None],
            keys,
            values,
            attn_mask=mask[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        return attended[:, :, 0]

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """See `nanoactor.models.sampling`."""
        return sample(logits, batch)
