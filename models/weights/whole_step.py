"""The weights of a model as fused matrices on the device, for operators that run a whole decode
step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nanoactor.models.weights.linear import Router


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in FP8. Each block of 8 outputs and 128 inputs shares one scale."""

    weight: torch.Tensor
    """float8_e4m3fn (outputs, inputs), or (experts, outputs, inputs) for experts; contiguous."""
    scales: torch.Tensor
    """float32 (outputs / 8, inputs / 128), or (experts, outputs / 8, inputs / 128) for experts."""


Matrix = torch.Tensor | PackedMatrix


def flat_matrix(matrix: Matrix) -> torch.Tensor:
    """Return the stored numbers of a matrix, without its scales, as (outputs, inputs). The matrices
    of experts are concatenated along the outputs."""
    return (matrix.weight if isinstance(matrix, PackedMatrix) else matrix).flatten(0, -2)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes and options of the mixture of experts in a layer."""

    experts: int
    top_k: int
    """Number of experts chosen for each token."""
    inner: int
    """Number of features between an expert's up and down projections."""
    renormalize: bool
    """True if the routing weights of a token's experts are scaled to a sum of 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, contiguous.

    Matrices are (outputs, inputs), or (experts, outputs, inputs) for experts.
    """

    norm1: torch.Tensor
    qkv: Matrix
    bias: torch.Tensor | None
    """Bias of `qkv`, (outputs,); None if it has no bias."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    norm2: torch.Tensor
    gate_up: Matrix
    """Gate projections followed by up projections."""
    down: Matrix
    router: Router | None = None
    """Router of a layer with experts; None for a dense layer."""

    @property
    def mixture(self) -> Mixture | None:
        """Sizes of the layer's experts; None for a dense layer."""
        if self.router is None:
            return None
        down = self.down.weight if isinstance(self.down, PackedMatrix) else self.down
        router = self.router
        return Mixture(len(router.weight), router.top_k, down.shape[-1], router.renormalize)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The layer's four matrices, in the order of their use."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights that a decode step of a model reads, for operators that run a whole step."""

    layers: Sequence[LayerWeights]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """Cosines of rotary positions, (positions, head_dim / 2), in the dtype of the weights."""
    sin: torch.Tensor

    @property
    def is_packed(self) -> bool | None:
        """True if all matrices are in FP8, False if none are, None if only some are."""
        kinds = {
            isinstance(matrix, PackedMatrix) for layer in self.layers for matrix in layer.matrices
        }
        return kinds.pop() if len(kinds) == 1 else None
