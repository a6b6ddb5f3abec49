"""The configuration of a model as layers and planners read it; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.models.vision.config import VisionConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the kind of scaling and its parameters."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    """yarn: the training length before stretching."""
    says_original: bool = dataclasses.field(default=False, compare=False)
    """True if the configuration states the original length; False if it is
    `max_position_embeddings`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    """llama3: frequencies with at most this many periods over the original length are scaled."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with at least this many periods are kept."""
    sections: tuple[int, int, int] | None = None
    """Frequencies of time, height and width, if picture tokens have three positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """Factors that some families have; 1 changes nothing."""

    embedding: float = 1.0
    residual: float = 1.0
    """Factor on the contribution of each part of a layer."""
    attention: float | None = None
    """Factor on products of queries and keys; None: head_dim ** -0.5."""
    logits_divisor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a checkpoint."""

    method: str
    raw: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and options of a decoder."""

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
    """True if attention's output projection has a bias."""
    mlp_bias: bool
    tie_embeddings: bool
    dtype: str
    """The data type in which the weights are stored, as the configuration says."""
    eos_token_ids: tuple[int, ...]
    vision: VisionConfig | None = None
    has_head: bool = True
    """False for a decoder alone, which can pool but not choose tokens."""
    scales: Scales = Scales()
    window: int | None = None
    """Positions that a token sees, itself included; None: all. Sequences are never longer, so each
    token sees all before it."""
    quantization: Quantization | None = None
    """Quantization of the matrices; None: not quantized."""
    family_options: object = None
    """Options read by `Family.read_options`, for the family alone."""

    @property
    def longest(self) -> int:
        """Return the positions of the rotary embedding. If a scaling stretches it and
        `max_position_embeddings` is unchanged, as in YaRN's recipe, this is its original length
        times the factor."""
        longest = self.max_positions
        if self.rope.kind in ("yarn", "linear"):
            longest = max(longest, int(self.rope.factor * self.rope.original_max_positions))
        return longest if self.window is None else min(longest, self.window)

    @property
    def default_length(self) -> int:
        """Return the maximum positions of a sequence unless the engine's options set it."""
        return self.longest if self.rope.says_original else min(self.longest, self.max_positions)
