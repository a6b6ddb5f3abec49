"""Device backends, in one package for each kind of device, and the function that opens a device."""

from __future__ import annotations

import importlib.util
import logging

import torch

from nanoactor.models.devices.protocols import Device
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.options import DeviceOptions

SUPPORTED_DEVICES = ("cpu", "cuda", "npu")

log = logging.getLogger("nanoactor.models.devices")


def open_device(name: str, rank: int = 0, options: DeviceOptions | None = None) -> Device:
    """Return the device with this name.

    The names are "cpu", "cuda:N", "npu:N", "cuda" or "npu" (the device with index `rank`), and
    "auto". "auto" chooses a GPU or NPU if one is available, and the CPU otherwise. Raises
    `UnsupportedModel`, which lists the supported names, for any other name.
    """
    if name == "auto":
        name = _detect_device()
    kind, _, index = name.partition(":")
    if kind == "npu" and (not index or index.isdecimal()):
        from nanoactor.models.devices.npu.device import NPUDevice
        from nanoactor.models.devices.npu.runtime import AscendRuntime

        return NPUDevice(AscendRuntime(int(index) if index else rank), options or DeviceOptions())
    if name == "cpu":
        return _open_cpu()
    if kind == "cuda" and (not index or index.isdecimal()):
        from nanoactor.models.devices.cuda.device import HAS_TRITON, CUDADevice, PortableCUDADevice

        device_index = int(index) if index else rank
        if HAS_TRITON:
            return CUDADevice(device_index)
        device = PortableCUDADevice(device_index)  # raises if there is no GPU
        log.warning(
            "Triton is not installed (pip install triton): steps run operator by operator and are "
            "not captured, so they are several times slower"
        )
        return device
    raise UnsupportedModel(
        f"device {name!r} is not supported; the supported devices are "
        f"{', '.join(SUPPORTED_DEVICES)}"
    )


def _open_cpu() -> Device:
    try:
        from nanoactor.models.devices.cpu.compiled import CompiledCPUDevice
    except ImportError as error:
        from nanoactor.models.devices.cpu.device import CPUDevice

        log.warning("decoding is several times slower without Numba (pip install numba): %s", error)
        return CPUDevice()
    return CompiledCPUDevice()


def _detect_device() -> str:
    """Return the first kind of device that is available: "cuda", "npu" or "cpu", in this order."""
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("torch_npu") is None:
        return "cpu"
    from nanoactor.models.devices.npu.runtime import load_torch_npu

    try:
        is_available = load_torch_npu().npu.is_available()
    except UnsupportedModel as error:
        log.warning("falling back to the CPU, which is many times slower: %s", error)
        return "cpu"
    return "npu" if is_available else "cpu"
