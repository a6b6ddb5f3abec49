"""One file for each kind of device."""

from __future__ import annotations

import logging

import torch

from nanoactor.models.device import Device
from nanoactor.models.errors import UnsupportedModel

KNOWN = ("cpu", "cuda")

log = logging.getLogger("nanoactor.models.devices")


def open_device(name: str, rank: int = 0) -> Device:
    """The device of this name: "cpu", "cuda" (the GPU of the rank), "cuda:N", or "auto": a GPU
    where there is one.

    Raises `UnsupportedModel`, with the list of known ones, for any other.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name == "cpu":
        from nanoactor.models.devices.cpu import CPUDevice

        return CPUDevice()
    if kind == "cuda" and (not index or index.isdecimal()):
        from nanoactor.models.devices.cuda import HAS_TRITON, CUDADevice, PortableCUDADevice

        number = int(index) if index else rank
        if HAS_TRITON:
            return CUDADevice(number)
        log.warning(
            "Triton is not installed: steps run operator by operator and are not captured, "
            "which costs several times the speed"
        )
        return PortableCUDADevice(number)
    raise UnsupportedModel(f"device {name!r} is not supported; known are {', '.join(KNOWN)}")
