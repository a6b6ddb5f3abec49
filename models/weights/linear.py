"""Weights of a projection, in the format of the checkpoint."""

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
    """Selected outputs of one matrix of a checkpoint."""

    name: str
    """Name of the matrix's tensor, without the `.weight` suffix."""
    outputs: int
    """Total number of outputs of the matrix."""
    rows: tuple[Span, ...] | None = None
    """Spans of the wanted outputs, in this order; None means all outputs."""

    @property
    def size(self) -> int:
        """Return the number of wanted outputs."""
        return self.outputs if self.rows is None else sum(span.size for span in self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """Definition of a linear operator, y = x Wᵀ + b, with the outputs of all parts in order."""

    parts: tuple[Part, ...]
    inputs: int
    """Total number of inputs of the matrices."""
    columns: Span | None = None
    """The inputs to load; None means all inputs."""
    bias: bool = False
    """True if the checkpoint has biases for all outputs of the parts."""


class LinearWeights(Protocol):
    """Weights in one of the formats: `Dense`, or one listed in `nanoactor.models.weights.formats`.
    Devices with an operator for a format use it unchanged; others use the result of
    `dequantize`."""

    @property
    def bias(self) -> torch.Tensor | None:
        """Return the bias, (outputs,), if there is one."""

    def dequantize(self) -> torch.Tensor:
        """Return the matrix, (outputs, inputs), in the model's type."""

    def without_bias(self) -> LinearWeights:
        """Return the same matrix without its bias."""

    def empty_stack(self, count: int) -> Self:
        """Allocate memory for `count` matrices of this shape, without biases."""

    def copy_into(self, index: int, matrix: Self) -> None:
        """Copy a matrix into the stack, at `index`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
    """A matrix in the compute type, or a stack of matrices."""

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
        """Allocate memory for `count` matrices of this shape, without biases."""
        return Dense(self.weight.new_empty(count, *self.weight.shape))

    def copy_into(self, index: int, matrix: Dense) -> None:
        """Copy a matrix into the stack, at `index`."""
        self.weight[index].copy_(matrix.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class DenseExperts:
    """The matrices of all experts of a layer, in the compute type."""

    gate_up: torch.Tensor
    """Gate projections, then up projections, (experts, 2 * inner, hidden)."""
    down: torch.Tensor
    """Down projections, (experts, hidden, inner)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of a layer, in a checkpoint's format; the shapes are those of
    `DenseExperts`."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Router:
    """Top-k routing: each token goes to the experts with the highest softmax scores."""

    weight: torch.Tensor
    """Router weights, float32 (experts, hidden)."""
    top_k: int
    """Number of experts chosen for each token."""
    renormalize: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""


def dense_of(weights: LinearWeights, reason: str | None = None) -> Dense:
    """Unpack a matrix of any format. Log once why it is unpacked: `reason`, or a default."""
    if isinstance(weights, Dense):
        return weights
    _log_once(
        f"weights in {type(weights).__name__} are unpacked and take as much memory and time as "
        "weights of the model's dtype, because "
        f"{reason or 'this device cannot multiply by packed weights'}"
    )
    return Dense(weights.dequantize(), weights.bias)


def dense_experts_of(weights: ExpertWeights, reason: str | None = None) -> DenseExperts:
    """Unpack the experts' matrices of any format. Log once why: `reason`, or a default."""
    gate_up, down = (dense_of(projection, reason) for projection in (weights.gate_up, weights.down))
    return DenseExperts(gate_up.weight, down.weight)


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)
