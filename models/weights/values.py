"""Checks of the values of loaded tensors."""

from __future__ import annotations

import math

import torch

from nanoactor.models.errors import WeightsError

_E4M3_MAGNITUDE = 0x7F
"""Bits of an e4m3 number without its sign. If all are set, it is NaN; e4m3fn has no infinity."""


def check_values(tensor: torch.Tensor, dtype: torch.dtype, origin: str) -> None:
    """Raise `WeightsError` if a value is not finite or is too large for `dtype`.

    `origin` names the file and the tensor. Waits for the device if the tensor is on one.
    """
    if not tensor.numel():
        return
    if tensor.dtype == torch.float8_e4m3fn:
        magnitudes = tensor.view(torch.uint8) & _E4M3_MAGNITUDE
        if int(magnitudes.max()) == _E4M3_MAGNITUDE:
            raise _not_finite(origin)
        return
    if tensor.dtype.itemsize == 1:  # aminmax is not implemented for one-byte types
        tensor = tensor.to(torch.bfloat16)
    low, high = (float(value) for value in torch.aminmax(tensor))  # NaN propagates
    if not math.isfinite(low) or not math.isfinite(high):
        raise _not_finite(origin)
    largest = torch.finfo(dtype).max
    if max(-low, high) > largest:
        raise WeightsError(
            f"{origin} contains {low if -low > high else high:g}, which {dtype} cannot "
            f"represent (its largest number is {largest:g}); choose another dtype"
        )


def _not_finite(origin: str) -> WeightsError:
    return WeightsError(
        f"{origin} contains values that are not finite (NaN or infinity), because the "
        "file is damaged or the training diverged; check_weights=False loads it anyway"
    )
