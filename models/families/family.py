"""Description of how families of decoders differ; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.models.layers.kinds import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from nanoactor.models.model_config import ModelConfig

Option = bool | str
"""A fixed value for a family, or the name of a flag in `config.json`, which is false if missing."""

LayerFactory = Callable[[ModelConfig], tuple[LayerSpec, ...]]


def dense_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return identical descriptions of layers with attention and SwiGLU."""
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
    """First entry of `architectures` in `config.json`."""
    layers: LayerFactory = dense_layers
    """Function that describes the layers of a model."""
    head_dim: int | None = None
    """Head size if the file omits it; None means hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """True if each query and key head is normalized before rotation."""
    qkv_bias: Option = False
    output_bias: Option = False
    """True if attention's output projection has a bias."""
    mlp_bias: Option = False
    rope_theta: float = 10_000.0
    """RoPE base if the file omits it."""
    embedding_scale: str | None = None
    """Key of the factor on embeddings. For this key and the next three, a missing key means 1."""
    residual_scale: str | None = None
    """Key of the factor on the output of each part of a layer."""
    attention_scale: str | None = None
    """Key of the factor on the products of queries and keys; None means head_dim ** -0.5."""
    logits_divisor: str | None = None
    """Key of the divisor of the logits."""
    sliding_window: str | None = None
    """Key of the number of positions that a token attends to in every layer; null means all."""
    default_window: int | None = None
    """Number of positions that a token attends to if the file lacks the key."""
    read_options: Callable[[Mapping[str, Any], object], object] | None = None
    """Function that reads the family's own options, used by `layers`, from the decoder's part of
    `config.json`. Its second argument names the file in errors. It raises `ModelError`."""
    option_keys: frozenset[str] = frozenset()
    """Keys that `read_options` reads, and other keys of the family that do not affect results."""
    text_config: str | None = None
    """Key of the object in `config.json` with the decoder's sizes; None if they are at the top."""
    text_prefix: str = "model"
    """Prefix of the decoder's weight names."""
    vision_prefix: str | None = None
    """Prefix of the vision tower's weight names; None if there is no tower."""
