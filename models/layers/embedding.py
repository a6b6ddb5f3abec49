"""The token embedding, whose vocabulary is divided among tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.layers.step import LayerContext


class Embedding:
    """The embedding table. Each rank has the rows of its share of the vocabulary."""

    def __init__(self, context: LayerContext, name: str) -> None:
        config, shard, group = context.config, context.shard, context.group
        rows = shard.vocabulary if group.size > 1 else None
        self.weight = context.weights.load(name, config.vocab_size, config.hidden_size, rows=rows)
        self._start, self._group = shard.vocabulary.start, group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, (tokens, hidden), of token ids, (tokens,)."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._start
        is_remote = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(is_remote, 0), self.weight)
        return self._group.all_reduce(x.masked_fill(is_remote[:, None], 0.0))
