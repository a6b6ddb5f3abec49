"""Linear projections that are divided among tensor-parallel ranks."""

from __future__ import annotations

import torch

from nanoactor.models.layers.step import LayerContext
from nanoactor.models.parallel import Span
from nanoactor.models.weights.linear import Projection


class ColumnParallel:
    """A projection, y = x Wᵀ + b, in which each rank computes its own share of the outputs.

    Several projections of the same input are fused into one.
    """

    def __init__(self, context: LayerContext, projection: Projection) -> None:
        """Load `projection`, which describes this rank's share. Raises `WeightsError` if a tensor
        does not fit."""
        self.operator = context.device.linear(context.weights.linear(projection))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, inputs) to (tokens, outputs of this rank)."""
        return self.operator(x)


class RowParallel:
    """A projection, y = x Wᵀ + b, in which each rank multiplies its own share of the inputs. The
    ranks' products are summed."""

    def __init__(self, context: LayerContext, projection: Projection) -> None:
        """Load `projection`, whose columns are this rank's share of the inputs."""
        self._group = context.group
        weights = context.weights.linear(projection)
        self._bias = None
        if self._group.size > 1:  # the bias is added once, to the sum
            self._bias, weights = weights.bias, weights.without_bias()
        self.operator = context.device.linear(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, inputs of this rank) to (tokens, outputs)."""
        return self.reduce(self.operator(x))

    def reduce(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' products `y`, (tokens, outputs), and add the bias if the operator does
        not."""
        y = self._group.all_reduce(y)
        return y if self._bias is None else y + self._bias


def columns_of_rank(inputs: int, span: Span) -> Span | None:
    """Return `span`, the columns that a rank loads, or None if these are all `inputs` columns of
    the matrix."""
    return None if span.size == inputs else span
