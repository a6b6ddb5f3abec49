"""The class that describes a family of decoder models. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.models.layers.kinds import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from nanoactor.models.model_config import ModelConfig

Option = bool | str
"""A boolean for all models of a family, or the key of a boolean in `config.json`, which is false if
missing."""

LayerFactory = Callable[[ModelConfig], tuple[LayerSpec, ...]]


def dense_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layer descriptions of a dense model, in which all layers have the same attention
    and SwiGLU feed-forward part."""
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
    """Description of a family of models: how its layers are built and which keys of `config.json`
    it uses."""

    architecture: str
    """First entry of `architectures` in `config.json`."""
    layers: LayerFactory = dense_layers
    """Function that returns the descriptions of a model's layers."""
    head_dim: int | None = None
    """Head size if `config.json` omits it; None means hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """True if each query and key head is normalized before rotation."""
    qkv_bias: Option = False
    output_bias: Option = False
    """True if the output projection of attention has a bias."""
    mlp_bias: Option = False
    rope_theta: float = 10_000.0
    """RoPE base (theta) if `config.json` omits it."""
    embedding_scale: str | None = None
    """Key of the factor on embeddings. For this and the next three options, None or a missing key
    means no scaling."""
    residual_scale: str | None = None
    """Key of the factor on the output of each part of a layer, before it is added to the residual
    stream."""
    attention_scale: str | None = None
    """Key of the factor on the products of queries and keys; None means a factor of head_dim **
    -0.5."""
    logits_divisor: str | None = None
    """Key of the number by which logits are divided."""
    sliding_window: str | None = None
    """Key of the window size: the number of most recent positions that a token attends to, in every
    layer. A null value means no limit."""
    default_window: int | None = None
    """Window size if the key is missing."""
    window_switch: str | None = None
    """Key that is true if some layers have a window, which is not supported. If it is false or
    missing, the size of the window has no effect."""
    read_options: Callable[[Mapping[str, Any], object], object] | None = None
    """Function that reads the options that only this family has, for use by `layers`.

    Its arguments are the decoder's part of `config.json` and the file's name for error messages. It
    raises `ModelError` for invalid values.
    """
    option_keys: frozenset[str] = frozenset()
    """Keys of this family that `read_options` reads, or that do not affect results."""
    text_config: str | None = None
    """Key of the object in `config.json` that contains the decoder's sizes; None if they are at the
    top level."""
    text_prefix: str = "model"
    """Prefix of the decoder's weight names."""
    vision_prefix: str | None = None
    """Prefix of the vision tower's weight names; None if there is no tower."""
