"""Descriptions of layers; a family provides one for each layer of a model. Imports no torch.

The mixer of a layer passes information between the tokens of a sequence; the feed-forward part
processes each token separately. Each description names its implementation class, so that a new kind
of layer needs only a description and a class, in any module.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

QKVLayout = Literal["separate", "stacked", "grouped"]
"""Layout of query, key and value projections: three tensors; one tensor with all queries, then all
keys, then all values; or one in which each group's queries are followed by its key and value."""


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """A root mean square norm."""

    eps: float
    adds_one: bool = False
    """True if the file stores w and the norm multiplies by 1 + w."""
    in_float32: bool = False
    """True if the weights stay in float32 and the product is rounded only once."""


@dataclasses.dataclass(frozen=True, slots=True)
class MixerSpec:
    """Base class of the descriptions of mixers."""

    implementation: ClassVar[str]
    """The implementing class, as "module:name": a `nanoactor.models.layers.layer.Mixer`."""
    keeps_slot_state: ClassVar[bool] = False
    """True if the mixer keeps an array for each sequence. Such a model gets no prefix cache hits,
    because the array at the end of a block cannot be restored from the block."""


@dataclasses.dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """Base class of the descriptions of feed-forward parts."""

    implementation: ClassVar[str]
    """The implementing class, as "module:name": a
    `nanoactor.models.layers.layer.FeedForward`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """Causal grouped-query attention with rotary position embedding."""

    implementation: ClassVar[str] = "nanoactor.models.layers.attention:Attention"
    qk_norm: NormSpec | None = None
    """Norm of each query and key head before rotation; None if there is no norm."""
    qkv_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    """Factor on the products of queries and keys; None means head_dim ** -0.5."""
    rotary_dim: int | None = None
    """Number of leading dimensions of a head that are rotated; None means all."""
    qkv: QKVLayout = "separate"
    """Layout of the query, key and value projections in the file."""
    name: str = "self_attn"


@dataclasses.dataclass(frozen=True, slots=True)
class MLPSpec(FeedForwardSpec):
    """A SwiGLU feed-forward part (arXiv:2002.05202)."""

    implementation: ClassVar[str] = "nanoactor.models.layers.mlp:MLP"
    inner: int
    """Inner dimension, between the projections."""
    bias: bool = False
    fused: bool = False
    """True if the file stores the gate and up projections in one tensor, gates first."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """SwiGLU experts, some of which a router chooses for each token."""

    implementation: ClassVar[str] = "nanoactor.models.layers.experts:Experts"
    experts: int
    top_k: int
    """Number of experts chosen for each token."""
    inner: int
    """Inner dimension of an expert, between its projections."""
    renormalize: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""
    transposed: bool = False
    """True if a file with all experts of a layer in one tensor stores inputs before outputs. Used
    only if the tensor's shape does not show this."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedExpertSpec(FeedForwardSpec):
    """Experts, and one more that processes all tokens; a sigmoid gate scales its output."""

    implementation: ClassVar[str] = "nanoactor.models.layers.shared_expert:SharedExpert"
    experts: FeedForwardSpec
    inner: int
    """Inner dimension of the shared expert."""
    name: str = "mlp"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """A mixer and a feed-forward part. Each is preceded by a norm, and its output is added to the
    residual stream."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    """Description of both norms."""
    residual_scale: float = 1.0
    """Factor on the outputs of both parts, before they are added to the residual stream."""
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
