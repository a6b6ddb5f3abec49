"""Checks of all tensors of a checkpoint by their headers, before their values are read, and the
size of a model's weights, before they are created."""

from __future__ import annotations

import dataclasses
import math
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
Check = Callable[[str, tuple[int, ...], torch.dtype | None], None]
"""Function that is called with each requested tensor's name, shape and, if it is packed, dtype."""


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
    """The tensors of other weights, without their values."""

    def __init__(self, weights: Weights, check: Check) -> None:
        """Have the tensors of `weights`, which must stay open. `check` is called with each tensor
        that is requested."""
        super().__init__(weights.origin, weights.dtype, _META, weights.format)
        self._weights, self._check = weights, check
        self._found: list[_Tensor] = []
        """Tensors that were found since the last projection began."""
        self._projections: dict[Hashable, tuple[LinearWeights, list[_Tensor]]] = {}
        """Weights and tensors of projections with different sizes."""

    @property
    def has_values(self) -> bool:
        """False."""
        return False

    def __contains__(self, name: str) -> bool:
        """Return True if there is a tensor with this name."""
        return name in self._weights

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must exist. Raises `WeightsError` if it is not
        known."""
        return self._weights.shape_of(name)

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return a tensor of the right shape and dtype on the meta device. Raises what `check`
        raises."""
        self._check(name, part.shape, stored)
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
            name = projection.parts[tensor.part].name + tensor.name
            self._check(name, tensor.shape, tensor.stored)
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
    _build(Headers(weights, weights.files.check), build)


def requested_bytes(
    weights: Weights, build: Callable[[Weights, Device], object], *, unpacked: bool
) -> int:
    """Return the size in bytes of the tensors that a model requests, of all ranks together.

    Packed tensors count with their own size, or with the size of the model's dtype if `unpacked` is
    True. All others have the model's dtype. `build` is as in `check_tensors`.
    """
    sizes: dict[str, int] = {}

    def note(name: str, shape: tuple[int, ...], stored: torch.dtype | None) -> None:
        dtype = weights.dtype if stored is None or unpacked else stored
        sizes[name] = math.prod(shape) * dtype.itemsize

    _build(Headers(weights, note), build)
    return sum(sizes.values())


def _build(headers: Headers, build: Callable[[Weights, Device], object]) -> None:
    with torch.inference_mode():
        build(headers, cast(Device, _MetaOperators()))
