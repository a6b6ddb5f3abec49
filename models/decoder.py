"""Dense decoders: what the families in `nanoactor.models.families.registry` share."""

from __future__ import annotations

import logging

import torch

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.collective import Group, SingleRank
from nanoactor.models.config import ModelConfig
from nanoactor.models.devices.protocols import Device, Linear
from nanoactor.models.families.registry import family_of
from nanoactor.models.layers.layers import DecoderLayer, Embedding, LayerContext, RMSNorm
from nanoactor.models.layers.rope import RotaryEmbedding
from nanoactor.models.parallel import shard_of
from nanoactor.models.weights.checkpoint import Weights
from nanoactor.models.weights.whole_step import ModelWeights

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
log = logging.getLogger("nanoactor.runner")


def _prefix(family: str, weights: Weights) -> str:
    """Return what the names of the decoder's weights begin with, dot included: nothing in a
    checkpoint of the decoder alone, as `AutoModel` saves it."""
    named = f"{family}."
    bare = f"{named}{_EMBEDDING}" not in weights and _EMBEDDING in weights
    return "" if bare else named


class Decoder:
    """Embedding, layers, final norm, head: a pre-norm decoder of any family."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: Device,
        max_positions: int,
        group: Group | None = None,
        *,
        headless: bool = False,
    ) -> None:
        """Take all weights, or one rank's part. A `headless` model chooses no tokens. Raises
        `WeightsError` for the first that does not fit, `UnsupportedModel` for a family that is not
        known."""
        prefix = _prefix(family_of(config.architecture).text_prefix, weights)
        self.group = group or SingleRank()
        self.config = config
        self._device = device
        self.max_positions = max_positions
        self.shard = shard_of(config, self.group.rank, self.group.size)
        context = LayerContext(config, weights, device, self.shard, self.group)
        self._embedding = Embedding(
            weights, f"{prefix}{_EMBEDDING}", self.shard, config, self.group
        )
        self._layers = [
            DecoderLayer(context, f"{prefix}layers.{index}") for index in range(config.num_layers)
        ]
        size = config.hidden_size
        self._norm = RMSNorm(weights, f"{prefix}norm", size, config.rms_norm_eps, device)
        self._head = device.linear(self._head_weight(weights, headless), None)
        rope = RotaryEmbedding(config.rope, config.head_dim, max_positions)
        self._rope = rope.to(weights.device, weights.dtype)

    def _head_weight(self, weights: Weights, headless: bool = False) -> torch.Tensor:
        """Return the embedding where they are tied, unless the file has another head: that one
        counts, as in transformers 5. The embedding stands in for a head that is not there and
        not used."""
        tied = self.config.tie_embeddings
        if (tied or headless) and _HEAD not in weights:
            return self._embedding.weight
        rows = self.shard.vocabulary if self.group.size > 1 else None
        shape = self.config.vocab_size, self.config.hidden_size
        head = weights.load(_HEAD, *shape, rows=rows)
        if tied and torch.equal(head, self._embedding.weight):
            return self._embedding.weight
        if tied:
            log.warning(
                "tie_word_embeddings is true, but %s is not the embedding: it is used, as by "
                "transformers 5; vLLM uses the embedding",
                _HEAD,
            )
        return head

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden) of ids (tokens,) and positions (tokens,), or (3, tokens)
        where some are of pictures; writes the caches. With `batch.final`, of its rows alone."""
        x = self._embedding(token_ids)
        rotation = self._device.rotation(*self._rope(positions))
        levels: tuple[torch.Tensor, ...] = ()
        if batch.visual is not None:
            seen, features = batch.visual.seen, batch.visual.features
            levels = torch.split(features, self.config.hidden_size, dim=1)
            x[: len(seen)] = torch.where(seen, levels[0], x[: len(seen)])
        residual = None
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True), start=1):
            final = batch.final if index == len(self._layers) else None
            x, residual = layer(x, residual, rotation, cache, batch, final)
            if final is not None and not len(x):
                return x
            if index < len(levels):  # deepstack, arXiv:2406.04334
                x, residual = residual + x, None
                x[: len(levels[index])] += levels[index]
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def weights(self) -> ModelWeights | None:
        """All tensors; None where a layer cannot give all of its own."""
        found = [layer.weights() for layer in self._layers]
        layers = [layer for layer in found if layer is not None]
        if len(layers) < len(found) or not isinstance(self._head, Linear):
            return None
        return ModelWeights(
            layers=layers,
            embed=self._embedding.weight,
            norm=self._norm.weight,
            head=self._head.weight,
            cos=self._rope.cos,
            sin=self._rope.sin,
        )

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, hidden) to (rows, vocabulary), or to this rank's part of it, padding included;
        written to `out`, where there is one."""
        if out is None:
            return self._head(hidden)
        assert isinstance(self._head, Linear)  # where `Device.keeps_logits`
        return torch.mm(hidden, self._head.weight.t(), out=out)
