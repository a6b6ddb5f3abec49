"""The weights of linear projections and of experts, in the checkpoint's format or unpacked."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Protocol, Self

import torch

from nanoactor.models.parallel import Span

log = logging.getLogger("nanoactor.weights")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Selected outputs (rows) of one matrix in a checkpoint."""

    name: str
    """Name of the matrix's tensor without the suffix `.weight`."""
    outputs: int
    """Total number of outputs of the matrix in the checkpoint."""
    rows: tuple[Span, ...] | None = None
    """Spans of the requested outputs, in the order of the result; None means all outputs."""

    @property
    def size(self) -> int:
        """Number of requested outputs."""
        return self.outputs if self.rows is None else sum(span.size for span in self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """Definition of a linear operator, y = x Wᵀ + b. Its outputs are those of all parts, in
    order."""

    parts: tuple[Part, ...]
    inputs: int
    """Total number of inputs of the matrices in the checkpoint."""
    columns: Span | None = None
    """The inputs to load; None means all inputs."""
    bias: bool = False
    """True if the checkpoint has a bias for each output of the parts."""


class LinearWeights(Protocol):
    """The weights of a projection in one format: `Dense`, or the class that a reader in
    `nanoactor.models.weights.formats` returns.

    A device that has an operator for a format uses the weights unchanged. Other devices unpack them
    with `dequantize`.
    """

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias, (outputs,), or None if there is none."""

    def dequantize(self) -> torch.Tensor:
        """Return the unpacked matrix, (outputs, inputs), in the dtype of the model."""

    def without_bias(self) -> LinearWeights:
        """Return the same matrix without its bias."""

    def empty_stack(self, count: int) -> Self:
        """Return a stack with uninitialized memory for `count` matrices of this shape, without
        biases."""

    def copy_into(self, index: int, matrix: Self) -> None:
        """Copy a matrix to position `index` of this stack."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
    """A matrix that is not packed, or a stack of such matrices, in the dtype in which the model
    computes."""

    weight: torch.Tensor
    """(outputs, inputs), or (matrices, outputs, inputs)."""
    bias: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the matrix unchanged."""
        return self.weight

    def without_bias(self) -> Dense:
        """Return the same matrix without its bias."""
        return Dense(self.weight)

    def empty_stack(self, count: int) -> Dense:
        """Return a stack with uninitialized memory for `count` matrices of this shape, without
        biases."""
        return Dense(self.weight.new_empty(count, *self.weight.shape))

    def copy_into(self, index: int, matrix: Dense) -> None:
        """Copy a matrix to position `index` of this stack."""
        self.weight[index].copy_(matrix.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class DenseExperts:
    """The matrices of all experts of a layer, not packed, in the dtype in which the model
    computes."""

    gate_up: torch.Tensor
    """Gate projections followed by up projections, (experts, 2 * inner, hidden)."""
    down: torch.Tensor
    """Down projections, (experts, hidden, inner)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of a layer, in the checkpoint's format. Unpacked, they have the
    shapes in `DenseExperts`."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Router:
    """Weights and options of top-k routing, which assigns each token to the experts with the
    highest softmax scores."""

    weight: torch.Tensor
    """Router weights, float32 (experts, hidden)."""
    top_k: int
    """Number of experts chosen for each token."""
    renormalize: bool
    """True if the routing weights of a token's experts are scaled to a sum of 1."""


def dense_of(weights: LinearWeights, reason: str | None = None) -> Dense:
    """Return the weights of a projection as `Dense`, unpacking them if they are in another format.

    When weights are unpacked, a warning states `reason` once. By default, the reason is that the
    device has no operator for the format.
    """
    if isinstance(weights, Dense):
        return weights
    _log_once(
        f"weights in {type(weights).__name__} are unpacked and take as much memory and time as "
        "weights of the model's dtype, because "
        f"{reason or 'this device cannot multiply by packed weights'}"
    )
    return Dense(weights.dequantize(), weights.bias)


def dense_experts_of(weights: ExpertWeights, reason: str | None = None) -> DenseExperts:
    """Return the matrices of all experts of a layer as `DenseExperts`. A warning about unpacking
    states `reason`, as in `dense_of`."""
    gate_up, down = (dense_of(projection, reason) for projection in (weights.gate_up, weights.down))
    return DenseExperts(gate_up.weight, down.weight)


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)
