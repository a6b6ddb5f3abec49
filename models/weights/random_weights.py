"""Random weights, for benchmarks."""

from __future__ import annotations

import torch

from nanoactor.models.errors import WeightsError
from nanoactor.models.weights.files import Selection
from nanoactor.models.weights.weights import Format, Weights


class RandomWeights(Weights):
    """Random weights of any requested shape, created on the device. No checkpoint is needed.

    They are for benchmarks. The duration of a step does not depend on the values of weights, except
    those of routers, which determine how many distinct experts are read.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, packed: Format | None = None
    ) -> None:
        """Seed the random numbers. `packed` describes the format of packed weights."""
        super().__init__("random weights", dtype, device, packed)
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        """Return False for the language-modeling head and for fused experts, and True for all other
        names.

        Tied weights therefore have no separate head, and experts have separate tensors.
        """
        return name != "lm_head.weight" and not name.endswith("experts.gate_up_proj")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Raise `WeightsError`, because any shape can be requested."""
        raise WeightsError(f"{name}: random weights have the shape that is requested")

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return normally distributed values with a standard deviation of 0.02, as in model
        initialization, or of 20 for integer dtypes. Weights of norms are ones."""
        sizes = part.sizes
        if len(part.shape) == 1 and "norm" in name:
            return torch.ones(sizes, dtype=dtype, device=self.device)
        is_wide_float = dtype.is_floating_point and dtype.itemsize > 1
        values = torch.empty(
            sizes, dtype=dtype if is_wide_float else torch.float32, device=self.device
        )
        values.normal_(0.0, 0.02 if dtype.is_floating_point else 20.0, generator=self._generator)
        return values.to(dtype)
