"""Checks of all tensors of a checkpoint by their headers, before their values are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from nanoactor.models.devices.protocols import Device, ExpertsOperator, Linear, LinearOperator
from nanoactor.models.parallel import Span
from nanoactor.models.weights.checkpoint import Rows, Weights
from nanoactor.models.weights.linear import ExpertWeights, LinearWeights

_META = torch.device("meta")
"""PyTorch's device for tensors that have a shape and a dtype but no values."""


class Headers(Weights):
    """The tensors of an open checkpoint, without their values."""

    def __init__(self, weights: Weights) -> None:
        """Use the open files of `weights`, which must stay open."""
        self.dtype, self.device = weights.dtype, _META
        self._share_files(weights)

    def load(
        self,
        name: str,
        *shape: int,
        rows: Rows | None = None,
        columns: Span | None = None,
        spans: tuple[Span | None, ...] = (),
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a tensor on the meta device with the shape and dtype that `Weights.load` would
        return. Raises the same errors, except those about values."""
        self._find(name, shape, stored)
        sizes = list(shape)
        if rows is not None:
            sizes[0] = sum(span.size for span in ([rows] if isinstance(rows, Span) else rows))
        if columns is not None:
            sizes[1] = columns.size
        for dimension, span in enumerate(spans):
            sizes[dimension] = sizes[dimension] if span is None else span.size
        return torch.empty(sizes, dtype=stored or dtype or self.dtype, device=_META)


class _MetaOperators:
    """The operators that layers create from their weights. They are never called."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return an operator without values."""
        return Linear(torch.empty(0, device=_META), weights.bias)

    def mlp(self, gate_up: LinearOperator, down: LinearOperator) -> LinearOperator:
        """Return one of the operators."""
        return down

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return an operator that cannot be called."""
        return _experts


def _experts(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("weights without values")


def check_tensors(weights: Weights, build: Callable[[Weights, Device], object]) -> None:
    """Raise `WeightsError` for the first tensor that is missing or has the wrong shape or dtype.

    `build` constructs a model from weights and a device. It is called with weights that have no
    values, which takes about 20 us for each tensor.
    """
    with torch.inference_mode():
        build(Headers(weights), cast(Device, _MetaOperators()))
