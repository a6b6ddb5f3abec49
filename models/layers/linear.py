"""Projections that are divided over the ranks."""

from __future__ import annotations

import torch

from nanoactor.models.layers.step import LayerContext
from nanoactor.models.parallel import Span
from nanoactor.models.weights.linear import Projection


class ColumnParallel:
    """y = x Wᵀ + b; each rank computes its own outputs.

    Several projections of the same input are fused into one.
    """

    def __init__(self, context: LayerContext, projection: Projection) -> None:
        """Load `projection`, this rank's part. Raises `WeightsError` if a tensor does not fit."""
        self.operator = context.device.linear(context.weights.linear(projection))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, inputs) to (tokens, this rank's outputs)."""
        return self.operator(x)


class RowParallel:
    """y = x Wᵀ + b; each rank has a part of the inputs, and the ranks' products are summed."""

    def __init__(self, context: LayerContext, projection: Projection) -> None:
        """Load `projection`, whose columns are this rank's part of the inputs."""
        self._group = context.group
        weights = context.weights.linear(projection)
        self._bias = None
        if self._group.size > 1:  # the bias is added once, to the sum
            self._bias, weights = weights.bias, weights.without_bias()
        self.operator = context.device.linear(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, this rank's inputs) to (tokens, outputs)."""
        y = self._group.all_reduce(self.operator(x))
        return y if self._bias is None else y + self._bias


def columns_of_rank(inputs: int, span: Span) -> Span | None:
    """Return the columns that a rank loads of a matrix with `inputs` columns; None if it loads
    all."""
    return None if span.size == inputs else span
