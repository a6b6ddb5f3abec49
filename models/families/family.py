"""Families of decoders and their differences; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.models.layers.kinds import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from nanoactor.models.model_config import ModelConfig

Option = bool | str
"""The same for all models of a family, or the name of a flag in `config.json`, false if missing."""

LayersOf = Callable[[ModelConfig], tuple[LayerSpec, ...]]


def dense_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Describe layers of attention and SwiGLU, all alike."""
    norm = NormSpec(config.rms_norm_eps)
    attention = AttentionSpec(
        qk_norm=norm if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        scale=config.scales.attention,
    )
    mlp = MLPSpec(config.intermediate_size, bias=config.mlp_bias)
    layer = LayerSpec(attention, mlp, norm, residual_scale=config.scales.residual)
    return (layer,) * config.num_layers


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Options of a family's models, as in transformers."""

    architecture: str
    """The first of `architectures` in `config.json`."""
    layers: LayersOf = dense_layers
    """Describes the layers of a model."""
    head_dim: int | None = None
    """Head size if the file omits it; None: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """True if queries and keys are normed, head by head, before they are rotated."""
    qkv_bias: Option = False
    output_bias: Option = False
    """True if attention's output projection has a bias."""
    mlp_bias: Option = False
    rope_theta: float = 10_000.0
    """RoPE base if the file omits it."""
    embedding_scale: str | None = None
    """The key of the factor on embeddings; of this and the next three a missing key means 1."""
    residual_scale: str | None = None
    """The key of the factor on each layer part's contribution to the residual."""
    attention_scale: str | None = None
    """The key of the factor on products of queries and keys. None: head_dim ** -0.5."""
    logits_divisor: str | None = None
    """The key of the divisor of logits."""
    sliding_window: str | None = None
    """The key of the number of positions that a token sees in every layer; null: all."""
    default_window: int | None = None
    """That number if the file has no such key."""
    read_options: Callable[[Mapping[str, Any], object], object] | None = None
    """Reads options of the family's own from the decoder's part of `config.json`, for its `layers`;
    the second argument names the file in errors. Raises `ModelError`."""
    option_keys: frozenset[str] = frozenset()
    """The keys that `read_options` reads, and the family's other keys that change no result."""
    text_config: str | None = None
    """The object of `config.json` that holds the decoder's sizes; None: the file itself."""
    text_prefix: str = "model"
    """Prefix of the decoder's weight names."""
    vision_prefix: str | None = None
    """The same of the vision tower; None: there is none."""
