"""A model's tensors as an operator for a whole step reads them: fused, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nanoactor.models.weights.linear import Router


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in FP8; 8 outputs and 128 inputs share one scale."""

    weight: torch.Tensor
    """float8_e4m3fn (outputs, inputs), contiguous; experts' (experts, outputs, inputs)."""
    scales: torch.Tensor
    """float32 (outputs / 8, inputs / 128); experts' (experts, outputs / 8, inputs / 128)."""


Matrix = torch.Tensor | PackedMatrix


def numbers_of(matrix: Matrix) -> torch.Tensor:
    """Return (outputs, inputs), packed or not; experts' matrices are consecutive."""
    return (matrix.weight if isinstance(matrix, PackedMatrix) else matrix).flatten(0, -2)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a mixture of experts."""

    experts: int
    chosen: int
    """Number of experts chosen for each token."""
    inner: int
    """The size between the projections of an expert."""
    normalizes: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors, contiguous; matrices are (outputs, inputs), those of experts (experts,
    outputs, inputs)."""

    norm1: torch.Tensor
    qkv: Matrix
    bias: torch.Tensor | None
    """Bias, (qkv outputs,)."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    norm2: torch.Tensor
    gate_up: Matrix
    """Gate projections, then up projections."""
    down: Matrix
    router: Router | None = None
    """Router of a layer with experts."""

    @property
    def mixture(self) -> Mixture | None:
        """Return its experts' sizes."""
        if self.router is None:
            return None
        down = self.down.weight if isinstance(self.down, PackedMatrix) else self.down
        router = self.router
        return Mixture(len(router.weight), router.chosen, down.shape[-1], router.normalizes)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the four matrices."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors read by a step."""

    layers: Sequence[LayerWeights]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """(positions, head_dim / 2), of the weights' type."""
    sin: torch.Tensor

    @property
    def is_packed(self) -> bool | None:
        """Return True if all layers' matrices are in FP8, False if none is, None if some are."""
        kinds = {isinstance(one, PackedMatrix) for layer in self.layers for one in layer.matrices}
        return kinds.pop() if len(kinds) == 1 else None
