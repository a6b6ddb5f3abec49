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
        read = context.weights.linear(projection)
        self._bias = None
        if self._group.size > 1:  # the bias is added once, to the sum
            self._bias, read = read.bias, read.without_bias()
        self.operator = context.device.linear(read)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, this rank's inputs) to (tokens, outputs)."""
        y = self._group.all_reduce(self.operator(x))
        return y if self._bias is None else y + self._bias


def part_of(inputs: int, mine: Span) -> Span | None:
    """Return the columns of a rank; None if they are all columns."""
    return None if mine.size == inputs else mine
