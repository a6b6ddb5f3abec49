"""A model's tensors in the form that an operator for a whole step reads: fused, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nanoactor.models.weights.linear import Router


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in FP8; each block of 8 outputs x 128 inputs shares one scale."""

    weight: torch.Tensor
    """float8_e4m3fn (outputs, inputs), or (experts, outputs, inputs) for experts; contiguous."""
    scales: torch.Tensor
    """float32 (outputs / 8, inputs / 128), or (experts, outputs / 8, inputs / 128) for experts."""


Matrix = torch.Tensor | PackedMatrix


def flat_matrix(matrix: Matrix) -> torch.Tensor:
    """Return a matrix's numbers, (outputs, inputs), without scales; experts are concatenated."""
    return (matrix.weight if isinstance(matrix, PackedMatrix) else matrix).flatten(0, -2)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes and options of a mixture of experts."""

    experts: int
    top_k: int
    """Number of experts chosen for each token."""
    inner: int
    """Inner dimension of an expert, between its projections."""
    renormalize: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors, contiguous. Matrices have the shape (outputs, inputs); those of the
    experts, (experts, outputs, inputs)."""

    norm1: torch.Tensor
    qkv: Matrix
    bias: torch.Tensor | None
    """Bias of `qkv`, (outputs,)."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    norm2: torch.Tensor
    gate_up: Matrix
    """Gate projections, then up projections."""
    down: Matrix
    router: Router | None = None
    """Router of a layer with experts; None for a dense layer."""

    @property
    def mixture(self) -> Mixture | None:
        """Return the sizes of the layer's experts; None for a dense layer."""
        if self.router is None:
            return None
        down = self.down.weight if isinstance(self.down, PackedMatrix) else self.down
        router = self.router
        return Mixture(len(router.weight), router.top_k, down.shape[-1], router.renormalize)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the layer's four matrices."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors that a step reads."""

    layers: Sequence[LayerWeights]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """(positions, head_dim / 2), in the weights' type."""
    sin: torch.Tensor

    @property
    def is_packed(self) -> bool | None:
        """Return True if all matrices are in FP8, False if none are, and None if only some are."""
        kinds = {
            isinstance(matrix, PackedMatrix) for layer in self.layers for matrix in layer.matrices
        }
        return kinds.pop() if len(kinds) == 1 else None
