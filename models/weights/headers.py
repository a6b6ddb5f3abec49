"""Checks of all tensors of a checkpoint by their headers, before their values are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import cast

import torch

from nanoactor.models.devices.protocols import Device, ExpertsOperator, Linear, LinearOperator
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.models.weights.files import Selection
from nanoactor.models.weights.linear import ExpertWeights, LinearWeights, Projection
from nanoactor.models.weights.weights import Weights

_META = torch.device("meta")
"""PyTorch's device for tensors that have a shape and a dtype but no values."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that was looked up."""

    name: str
    """Name of the tensor, or what follows the name of the part."""
    shape: tuple[int, ...]
    stored: torch.dtype | None
    part: int = 0
    """Index of the part of the projection to which the tensor belongs."""

    def relative_to(self, projection: Projection) -> _Tensor:
        """Return the tensor with its name relative to that of its part. Raises `ValueError` if it
        belongs to no part of the projection."""
        for index, part in enumerate(projection.parts):
            if self.name.startswith(f"{part.name}."):
                return dataclasses.replace(self, name=self.name[len(part.name) :], part=index)
        raise ValueError(f"{self.name} does not belong to {projection}")


class Headers(Weights):
    """The tensors of an open checkpoint, without their values."""

    def __init__(self, weights: CheckpointWeights) -> None:
        """Use the open files of `weights`, which must stay open."""
        super().__init__(weights.origin, weights.dtype, _META, weights.format)
        self._files = weights.files
        self._found: list[_Tensor] = []
        """Tensors that were found since the last projection began."""
        self._projections: dict[Hashable, tuple[LinearWeights, list[_Tensor]]] = {}
        """Weights and tensors of projections with different sizes."""

    @property
    def has_values(self) -> bool:
        """False."""
        return False

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor with this name."""
        return name in self._files.names

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must exist."""
        return self._files.shape_of(name)

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return a tensor of the right shape and dtype on the meta device. Raises the same errors
        as with values, except those about values."""
        self._files.check(name, part.shape, stored)
        self._found.append(_Tensor(name, part.shape, stored))
        return torch.empty(part.sizes, dtype=dtype, device=_META)

    def linear(self, projection: Projection) -> LinearWeights:
        """Return the weights of a projection, without values.

        The results of projections that differ only in their names are the same object, because
        operations on the meta device take longer than the checks.
        """
        sizes = tuple((part.outputs, part.rows) for part in projection.parts)
        columns, bias = projection.columns, projection.bias
        key = sizes, projection.inputs, columns, bias, self.is_packed(projection)
        if key not in self._projections:
            self._found = []
            self._projections[key] = (
                super().linear(projection),
                [tensor.relative_to(projection) for tensor in self._found],
            )
            return self._projections[key][0]
        weights, tensors = self._projections[key]
        for tensor in tensors:
            self._files.check(
                projection.parts[tensor.part].name + tensor.name, tensor.shape, tensor.stored
            )
        return weights

    def _store(self, stack: LinearWeights, index: int, weights: LinearWeights) -> None:
        """Do nothing, because there are no values."""


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


def check_tensors(weights: CheckpointWeights, build: Callable[[Weights, Device], object]) -> None:
    """Raise `WeightsError` for the first tensor that is missing or has the wrong shape or dtype.

    `build` constructs a model from weights and a device. It is called with weights that have no
    values.
    """
    with torch.inference_mode():
        build(Headers(weights), cast(Device, _MetaOperators()))
