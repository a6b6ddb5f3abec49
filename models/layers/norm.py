"""Root mean square normalization, with and without residual addition."""

from __future__ import annotations

import torch

from nanoactor.models.devices.protocols import Consumer
from nanoactor.models.layers.kinds import NormSpec
from nanoactor.models.layers.step import LayerContext


class RMSNorm:
    """Root mean square normalization, optionally fused with the residual addition before it."""

    def __init__(self, spec: NormSpec, context: LayerContext, name: str, size: int) -> None:
        self.weight = norm_weight(spec, context, name, size)
        self._eps = spec.eps
        self._device = context.device

    def __call__(self, x: torch.Tensor, consumer: Consumer = None) -> torch.Tensor:
        """Return `x` normalized over its last dimension. `consumer` is the operator that is called
        with it, if it is known."""
        return self._device.rms_norm(x, self.weight, self._eps, consumer)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, consumer: Consumer = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of x + residual, x + residual). `consumer` is the operator that is called
        with the norm, if it is known."""
        return self._device.add_rms_norm(x, residual, self.weight, self._eps, consumer)


def norm_weight(spec: NormSpec, context: LayerContext, name: str, size: int) -> torch.Tensor:
    """Return the weight, (size,), of the norm called `name`. If the norm multiplies by 1 + w, the 1
    is already added."""
    weights = context.weights
    # In a narrower type, 1 + w would lose bits of w.
    load_float32 = spec.in_float32 or spec.adds_one
    weight = weights.load(f"{name}.weight", size, dtype=torch.float32 if load_float32 else None)
    if spec.adds_one:
        weight = weight + 1
    return weight if spec.in_float32 else weight.to(weights.dtype)
