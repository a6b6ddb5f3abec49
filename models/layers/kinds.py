"""Descriptions of layers: a family gives one for each layer of a model; imports no torch.

The mixer of a layer lets tokens of a sequence see each other, its feed-forward part handles each
separately. Each description names its implementation class, so that a new kind needs only a
description and a class, in any module.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

QKVLayout = Literal["separate", "stacked", "grouped"]
"""Three tensors; one with all queries, then all keys, then all values; or one in which each group's
queries are followed by its key and its value."""


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """A root mean square norm."""

    eps: float
    adds_one: bool = False
    """True if the file stores w and the norm multiplies by 1 + w."""
    in_float32: bool = False
    """True if the weights stay in float32 and the product is rounded once."""


@dataclasses.dataclass(frozen=True, slots=True)
class MixerSpec:
    """The base of all mixers."""

    implementation: ClassVar[str]
    """The class that is made from it, as "module:name": a `nanoactor.models.layers.layer.Mixer`."""
    keeps_slot_state: ClassVar[bool] = False
    """True if it keeps an array for each sequence. Such a model takes no prefix-cache hits: the
    array at the end of a block cannot be restored from the block."""


@dataclasses.dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """The base of all feed-forward parts."""

    implementation: ClassVar[str]
    """The class that is made from it, as "module:name": a
    `nanoactor.models.layers.layer.FeedForward`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """Causal attention with grouped queries and rotated positions."""

    implementation: ClassVar[str] = "nanoactor.models.layers.attention:Attention"
    qk_norm: NormSpec | None = None
    """Norm of queries and keys, head by head, before they are rotated; None: no norm."""
    qkv_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    """Factor on the products of queries and keys; None: head_dim ** -0.5."""
    rotary_dim: int | None = None
    """Number of leading dimensions of a head that are rotated; None: all."""
    qkv: QKVLayout = "separate"
    """Layout of the projections in the file."""
    name: str = "self_attn"


@dataclasses.dataclass(frozen=True, slots=True)
class MLPSpec(FeedForwardSpec):
    """Describes a SwiGLU feed-forward (arXiv:2002.05202)."""

    implementation: ClassVar[str] = "nanoactor.models.layers.mlp:MLP"
    inner: int
    """The size between the projections."""
    bias: bool = False
    fused: bool = False
    """True if the file stores gate and up projections in one tensor, gates first."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """SwiGLU experts; a router chooses some of them for each token."""

    implementation: ClassVar[str] = "nanoactor.models.layers.experts:Experts"
    experts: int
    chosen: int
    """Experts of each token."""
    inner: int
    """The size between the projections of an expert."""
    normalizes: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""
    transposed: bool = False
    """True if a file with all experts of a layer in one tensor stores inputs before outputs; shapes
    decide where they are unambiguous."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward part, each after a norm, added to the residual."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    """Description of both norms."""
    residual_scale: float = 1.0
    """Factor of both parts' outputs before they are added to the residual."""
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
