"""The SwiGLU feed-forward part of dense layers."""

from __future__ import annotations

import torch

from nanoactor.models.layers.kinds import MLPSpec
from nanoactor.models.layers.linear import ColumnParallel, RowParallel, columns_of_rank
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.weights.linear import Part, Projection


class MLP:
    """SwiGLU feed-forward part. The gate and up projections are computed in one product."""

    def __init__(self, spec: MLPSpec, context: LayerContext, prefix: str) -> None:
        name, inner, hidden = f"{prefix}.{spec.name}", spec.inner, context.config.hidden_size
        span = context.shard.part(inner)
        if spec.fused:
            fused_name = f"{name}.gate_up_proj"
            parts = tuple(
                Part(fused_name, 2 * inner, (span.shifted(offset),)) for offset in (0, inner)
            )
        else:
            names = f"{name}.gate_proj", f"{name}.up_proj"
            parts = tuple(Part(tensor_name, inner, (span,)) for tensor_name in names)
        self.gate_up = ColumnParallel(context, Projection(parts, hidden, bias=spec.bias))
        down = (Part(f"{name}.down_proj", hidden),)
        self.down = RowParallel(
            context, Projection(down, inner, columns=columns_of_rank(inner, span), bias=spec.bias)
        )
        self.input_operator = context.device.mlp(self.gate_up.operator, self.down.operator)

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape."""
        return self.down.reduce(self.input_operator(x))
