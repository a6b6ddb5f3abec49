"""The parsed configuration of a model, used by layers and planners. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.models.vision.config import VisionConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Configuration of rotary position embeddings: the kind of scaling and its parameters."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length in training, before rope scaling; 0 if there is no scaling."""
    has_original_max_positions: bool = dataclasses.field(default=False, compare=False)
    """True if the configuration contains the original length. Otherwise, `max_position_embeddings`
    is used."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    """For llama3: frequencies with at most this many periods over the original length are divided
    by `factor`."""
    high_freq_factor: float = 4.0
    """For llama3: frequencies with at least this many periods over the original length are kept."""
    sections: tuple[int, int, int] | None = None
    """For M-RoPE: numbers of frequencies for time, height and width. None for models without
    M-RoPE."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """Scaling factors that some families use. A factor of 1 has no effect."""

    embedding: float = 1.0
    residual: float = 1.0
    """Factor on the output of each part of a layer, before it is added to the residual stream."""
    attention: float | None = None
    """Factor on the products of queries and keys; None means head_dim ** -0.5."""
    logits_divisor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a checkpoint, with its method and all of its values."""

    method: str
    raw: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of a model, mainly of its decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    """True if the output projection of attention has a bias."""
    mlp_bias: bool
    tie_embeddings: bool
    dtype: str
    """Name of the stored weights' dtype, according to the configuration."""
    eos_token_ids: tuple[int, ...]
    vision: VisionConfig | None = None
    has_head: bool = True
    """True if the model has a language-modeling head. Without one, it can only compute pooled
    hidden states, not generate tokens."""
    scales: Scales = Scales()
    window: int | None = None
    """Number of most recent positions that a token attends to, including its own; None for no
    limit.

    Sequences are never longer than this, so every token attends to all tokens before it.
    """
    quantization: Quantization | None = None
    """Quantization of the weight matrices; None if they are not quantized."""
    family_options: object = None
    """Options that `Family.read_options` returned, used only by the model's family."""

    @property
    def max_context_length(self) -> int:
        """Maximum number of positions that the model supports.

        With YaRN or linear scaling, this is at least the original length times the factor, even if
        `max_position_embeddings` is still the original length, as in YaRN's recipe. It never
        exceeds the window.
        """
        longest = self.max_positions
        if self.rope.kind in ("yarn", "linear"):
            longest = max(longest, int(self.rope.factor * self.rope.original_max_positions))
        return longest if self.window is None else min(longest, self.window)

    @property
    def default_max_length(self) -> int:
        """Maximum length of sequences, in tokens, if the engine's options do not set one.

        Positions added by rope scaling count only if the configuration states the original length.
        """
        return (
            self.max_context_length
            if self.rope.has_original_max_positions
            else min(self.max_context_length, self.max_positions)
        )
