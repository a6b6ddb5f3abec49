"""A dense model's tensors as an operator for a whole step reads them: fused, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors, contiguous; matrices are (outputs, inputs)."""

    norm1: torch.Tensor
    qkv: torch.Tensor
    bias: torch.Tensor | None
    """(qkv outputs,)."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    norm2: torch.Tensor
    gate_up: torch.Tensor
    """Gates, then ups."""
    down: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors that a step reads."""

    layers: Sequence[LayerWeights]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """(positions, head_dim / 2), of the weights' type."""
    sin: torch.Tensor
