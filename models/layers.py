"""The layers that decoder models are made of. A layer takes its weights when it is made."""

from __future__ import annotations

import torch

from nanoactor.models.device import Device
from nanoactor.models.weights import Weights


class Linear:
    """y = x Wᵀ + b. Several projections of the same input are fused into one."""

    def __init__(
        self,
        weights: Weights,
        names: list[str],
        inputs: int,
        outputs: list[int],
        device: Device,
        bias: bool = False,
    ) -> None:
        weight = weights.concatenated([f"{n}.weight" for n in names], outputs, inputs)
        added = weights.concatenated([f"{n}.bias" for n in names], outputs) if bias else None
        self._operator = device.linear(weight, added)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, inputs) to (tokens, sum of outputs)."""
        return self._operator(x)


class RMSNorm:
    """Root mean square normalisation, optionally with the residual sum before it."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, device: Device) -> None:
        self._weight = weights.take(f"{name}.weight", size)
        self._eps = eps
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x over its last dimension."""
        return self._device.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return self._device.add_rms_norm(x, residual, self._weight, self._eps)
