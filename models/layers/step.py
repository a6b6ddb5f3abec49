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
    """Inputs for the construction of a layer, other than its description."""

    config: ModelConfig
    weights: Weights
    device: Operators
    shard: Shard
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStep:
    """Inputs of a layer at each step, other than hidden states and the layer's own state."""

    batch: AttentionBatch
    """Rows of the step, their positions in the cache and their contexts."""
    rotation: Rotation
    """Cosines and sines of the tokens' positions, as returned by `Operators.rotation`."""
    final_rows: FinalRows | None = None
    """Set in the last layer if the results of only some tokens are read."""
