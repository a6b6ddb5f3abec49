"""The inputs of layers, at construction and in each step."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.batch import AttentionBatch, FinalRows
from nanoactor.models.collective import Group
from nanoactor.models.devices.protocols import Operators
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.parallel import Shard
from nanoactor.models.weights.weights import Weights

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContext:
    """Arguments that the constructors of all layers receive in addition to the layer's
    description."""

    config: ModelConfig
    weights: Weights
    device: Operators
    shard: Shard
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStep:
    """Arguments that a layer receives in each step in addition to hidden states and its own
    state."""

    batch: AttentionBatch
    """Rows of the step with their cache positions and context lengths."""
    rotation: Rotation
    """Cosines and sines of the tokens' positions, as returned by `Operators.rotation`."""
    final_rows: FinalRows | None = None
    """Tokens whose results are needed. Set only in the last layer; None if all are needed."""
