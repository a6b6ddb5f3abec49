"""The decoder of a model, assembled from the layer descriptions of its family."""

from __future__ import annotations

import dataclasses
import logging

import torch

from nanoactor.models.batch import ForwardInputs
from nanoactor.models.collective import Group, SingleRank
from nanoactor.models.devices.protocols import Device, Linear
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.families.registry import family_of, layers_of
from nanoactor.models.layers.decoder_layer import DecoderLayer
from nanoactor.models.layers.embedding import Embedding
from nanoactor.models.layers.kinds import AttentionSpec, NormSpec
from nanoactor.models.layers.norm import RMSNorm
from nanoactor.models.layers.rope import RotaryEmbedding
from nanoactor.models.layers.state import StateSpec
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.model_config import ModelConfig, Scales
from nanoactor.models.parallel import shard_of
from nanoactor.models.weights.linear import Dense
from nanoactor.models.weights.weights import Weights
from nanoactor.models.weights.whole_step import ModelWeights

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
log = logging.getLogger("nanoactor.runner")


def _prefix(family: str, weights: Weights) -> str:
    """Return the prefix of the decoder's weight names, with a trailing dot. `family` is the prefix
    that the model's family uses.

    The result is empty for a checkpoint that contains only the decoder, as `AutoModel` saves it.
    """
    prefix = f"{family}."
    is_bare = f"{prefix}{_EMBEDDING}" not in weights and _EMBEDDING in weights
    return "" if is_bare else prefix


class Decoder:
    """A pre-norm decoder of any family: embedding, layers, final norm and language-modeling
    head."""

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
        """Load all weights, or one tensor-parallel rank's share of them.

        `headless` is True for a model that generates no tokens. Raises `WeightsError` for the first
        tensor that does not fit, and `UnsupportedModel` for an unknown family or unsupported
        layers.
        """
        prefix = _prefix(family_of(config.architecture).text_prefix, weights)
        self.group = group or SingleRank()
        self.config = config
        self._device = device
        self.max_positions = max_positions
        self.shard = shard_of(config, self.group.rank, self.group.size)
        context = LayerContext(config, weights, device, self.shard, self.group)
        specs = layers_of(config)
        self._embedding = Embedding(context, f"{prefix}{_EMBEDDING}")
        self._layers = [
            DecoderLayer(spec, context, f"{prefix}layers.{index}")
            for index, spec in enumerate(specs)
        ]
        norm = specs[0].norm if specs else NormSpec(config.rms_norm_eps)
        self._norm = RMSNorm(norm, context, f"{prefix}norm", config.hidden_size)
        self._head = device.linear(Dense(self._head_weight(weights, headless)))
        rotary_dims = {
            spec.mixer.rotary_dim for spec in specs if isinstance(spec.mixer, AttentionSpec)
        }
        if len(rotary_dims) > 1:
            raise UnsupportedModel(
                f"layers with different numbers of rotary dimensions, {rotary_dims}, are not "
                "supported"
            )
        rotary_dim = next(iter(rotary_dims), None) or config.head_dim
        rope = RotaryEmbedding(config.rope, rotary_dim, max_positions)
        self._rope = rope.to(weights.device, weights.dtype)

    def _head_weight(self, weights: Weights, headless: bool = False) -> torch.Tensor:
        """Return the weight of the language-modeling head, or this rank's rows of it.

        If weights are tied, or if `headless` is True, a checkpoint without a separate head uses the
        embedding. If a tied checkpoint nevertheless has a separate head, that head takes
        precedence, as in transformers 5.
        """
        tied = self.config.tie_embeddings
        if (tied or headless) and _HEAD not in weights:
            return self._embedding.weight
        rows = self.shard.vocabulary if self.group.size > 1 else None
        shape = self.config.vocab_size, self.config.hidden_size
        head = weights.load(_HEAD, *shape, rows=rows)
        if tied and (not weights.has_values or torch.equal(head, self._embedding.weight)):
            return self._embedding.weight
        if tied:
            log.warning(
                "tie_word_embeddings is true, but %s differs from the embedding and is used "
                "instead, as in transformers 5; vLLM uses the embedding",
                _HEAD,
            )
        return head

    @property
    def states(self) -> list[StateSpec]:
        """Specifications of the state that the layers keep between steps, in layer order."""
        return [layer.state for layer in self._layers]

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Run the decoder and return the final hidden states, (tokens, hidden), or only those of
        `batch.final_rows` if that is set. Update the layers' states in place."""
        batch, scales = inputs.batch, self.config.scales
        x = self._embedding(inputs.token_ids)
        if scales.embedding != 1.0:
            x = x * scales.embedding
        step = LayerStep(batch, self._device.rotation(*self._rope(inputs.positions)))
        levels: tuple[torch.Tensor, ...] = ()
        if batch.visual is not None:
            mask, features = batch.visual.mask, batch.visual.features
            levels = torch.split(features, self.config.hidden_size, dim=1)
            x[: len(mask)] = torch.where(mask, levels[0], x[: len(mask)])
        residual = None
        for index, (layer, state) in enumerate(
            zip(self._layers, inputs.states, strict=True), start=1
        ):
            if index == len(self._layers) and batch.final_rows is not None:
                step = dataclasses.replace(step, final_rows=batch.final_rows)
            x, residual = layer(x, residual, state, step)
            if step.final_rows is not None and not len(x):
                return x
            if index < len(levels):  # deepstack, arXiv:2406.04334
                x, residual = residual + x, None
                x[: len(levels[index])] += levels[index]
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def weights(self) -> ModelWeights | None:
        """Return all weight tensors for operators that run a whole decode step, or None if
        `ModelWeights` cannot describe the model completely."""
        optional = [layer.weights() for layer in self._layers]
        layers = [layer for layer in optional if layer is not None]
        if len(layers) < len(optional) or not isinstance(self._head, Linear):
            return None
        if self.config.scales != Scales():
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
        """Return the logits of hidden states (rows, hidden), as (rows, vocabulary).

        With tensor parallelism, these are the logits of this rank's share of the vocabulary,
        including padding. If `out` is not None, they are written to it.
        """
        if out is None:
            logits = self._head(hidden)
        else:
            assert isinstance(self._head, Linear)  # implied by `DeviceTraits.keeps_logits`
            logits = torch.mm(hidden, self._head.weight.t(), out=out)
        divisor = self.config.scales.logits_divisor
        return logits if divisor == 1.0 else logits.div_(divisor)
