"""The feed-forward part of dense layers."""

from __future__ import annotations

import torch

from nanoactor.models.layers.kinds import MLPSpec
from nanoactor.models.layers.linear import ColumnParallel, RowParallel, part_of
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.weights.linear import Part, Projection


class MLP:
    """Gate and up projections in one product, SwiGLU, and the down projection."""

    def __init__(self, spec: MLPSpec, context: LayerContext, prefix: str) -> None:
        name, inner, hidden = f"{prefix}.{spec.name}", spec.inner, context.config.hidden_size
        mine = context.shard.part(inner)
        if spec.fused:
            both = f"{name}.gate_up_proj"
            parts = tuple(Part(both, 2 * inner, (mine.moved(at),)) for at in (0, inner))
        else:
            names = f"{name}.gate_proj", f"{name}.up_proj"
            parts = tuple(Part(one, inner, (mine,)) for one in names)
        self.gate_up = ColumnParallel(context, Projection(parts, hidden, bias=spec.bias))
        down = (Part(f"{name}.down_proj", hidden),)
        self.down = RowParallel(
            context, Projection(down, inner, columns=part_of(inner, mine), bias=spec.bias)
        )
        self._device = context.device

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape."""
        return self.down(self._device.swiglu(self.gate_up(x)))
