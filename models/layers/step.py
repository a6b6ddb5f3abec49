"""Inputs of layers, at construction and at each step."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.batch import AttentionBatch, FinalRows
from nanoactor.models.collective import Group
from nanoactor.models.devices.protocols import Operators
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.parallel import Shard
from nanoactor.models.weights.checkpoint import Weights

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContext:
    """All that a layer is made from, but for its description."""

    config: ModelConfig
    weights: Weights
    device: Operators
    shard: Shard
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStep:
    """All that a layer is given beside hidden states and its own state."""

    batch: AttentionBatch
    """Its rows, where they are stored, what each sees."""
    rotation: Rotation
    """Cosines and sines of the rows' positions, as `Operators.rotation` prepares them."""
    final: FinalRows | None = None
    """Set in the last layer where only some rows' results are read."""
