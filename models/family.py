"""What tells one family of dense decoders from another; imports no torch."""

from __future__ import annotations

import dataclasses

Option = bool | str
"""The same for all models of a family, or the name of a flag in `config.json`, false if missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Options of the layers in `nanoactor.models.layers`, as transformers has them."""

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
