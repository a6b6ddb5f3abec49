"""Families of dense decoders, and what tells them apart; imports no torch."""

from __future__ import annotations

import dataclasses

Option = bool | str
"""The same for all models of a family, or the name of a flag in `config.json`, false if missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Options of the layers in `nanoactor.models.layers.layers`, as transformers has them."""

    architecture: str
    """The first of `architectures` in `config.json`."""
    head_dim: int | None = None
    """Where the file says nothing; None: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """Queries and keys are normed, head by head, before they are rotated."""
    qkv_bias: Option = False
    output_bias: Option = False
    """Of attention's output projection."""
    mlp_bias: Option = False
    rope_theta: float = 10_000.0
    """Where the file says nothing."""
    text_config: str | None = None
    """The object of `config.json` that holds the decoder's sizes; None: the file itself."""
    text_prefix: str = "model"
    """What the names of the decoder's weights begin with."""
    vision_prefix: str | None = None
    """The same of the vision tower; None: there is none."""
