"""Descriptions of layers. A model family provides one for each layer. Imports no torch.

The mixer of a layer passes information between the tokens of a sequence. The feed-forward part
processes each token separately. Each description names the class that implements it, so a new kind
of layer needs only a description and a class, in any module.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

QKVLayout = Literal["separate", "stacked", "grouped"]
"""How query, key and value projections are stored.

"separate": three tensors. "stacked": one tensor with all queries, then all keys, then all values.
"grouped": one tensor in which the queries of each group are followed by the group's key and value.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """Description of a root mean square norm."""

    eps: float
    adds_one: bool = False
    """True if the checkpoint stores w and the norm multiplies by 1 + w."""
    in_float32: bool = False
    """True if the weight stays in float32 and the product is rounded only once."""


@dataclasses.dataclass(frozen=True, slots=True)
class MixerSpec:
    """Base class of mixer descriptions. A mixer, such as attention, passes information between
    tokens."""

    implementation: ClassVar[str]
    """Class that implements the part, as "module:name". It follows the protocol
    `nanoactor.models.layers.layer.Mixer`."""
    keeps_slot_state: ClassVar[bool] = False
    """True if the mixer keeps an array for each sequence, outside the KV blocks.

    A model with such a mixer cannot reuse cached prefixes, because their blocks do not contain the
    array.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """Base class of descriptions of feed-forward parts, which process each token separately."""

    implementation: ClassVar[str]
    """Class that implements the part, as "module:name". It follows the protocol
    `nanoactor.models.layers.layer.FeedForward`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """Description of causal grouped-query attention with rotary position embedding."""

    implementation: ClassVar[str] = "nanoactor.models.layers.attention:Attention"
    qk_norm: NormSpec | None = None
    """Norm of each query and key head before rotation; None for no norm."""
    qkv_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    """Factor on the products of queries and keys; None means head_dim ** -0.5."""
    rotary_dim: int | None = None
    """Number of leading dimensions of each head that are rotated; None means all."""
    qkv: QKVLayout = "separate"
    """How the checkpoint stores the query, key and value projections."""
    name: str = "self_attn"


@dataclasses.dataclass(frozen=True, slots=True)
class MLPSpec(FeedForwardSpec):
    """Description of a SwiGLU feed-forward part (arXiv:2002.05202)."""

    implementation: ClassVar[str] = "nanoactor.models.layers.mlp:MLP"
    inner: int
    """Number of features between the up and the down projection."""
    bias: bool = False
    fused: bool = False
    """True if the checkpoint stores the gate and up projections in one tensor, gates first."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """Description of a mixture of SwiGLU experts, in which a router chooses some experts for each
    token."""

    implementation: ClassVar[str] = "nanoactor.models.layers.experts:Experts"
    experts: int
    top_k: int
    """Number of experts chosen for each token."""
    inner: int
    """Number of features between an expert's up and down projections."""
    renormalize: bool
    """True if the routing weights of a token's experts are scaled to a sum of 1."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpertSpec(FeedForwardSpec):
    """Description of routed experts plus one shared expert, which processes all tokens and whose
    output is scaled by a sigmoid gate."""

    implementation: ClassVar[str] = "nanoactor.models.layers.shared_expert:SharedExpert"
    experts: FeedForwardSpec
    inner: int
    """Number of features between the shared expert's up and down projections."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """Description of a layer: a mixer and a feed-forward part. Each is preceded by a norm, and its
    output is added to the residual stream."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    """Description of both norms."""
    residual_scale: float = 1.0
    """Factor on the output of each part, before it is added to the residual stream."""
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
