"""The CPU device with PyTorch's operators. In float32, its results are the reference for
correctness.

`compiled.py` has a faster device, which needs Numba.
"""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path

import numpy as np
import torch

from nanoactor.models.devices.portable import HostEvent, PortableOperators
from nanoactor.models.devices.protocols import DeviceTraits, LinearOperator, Memory
from nanoactor.models.weights.linear import LinearWeights, dense_of

log = logging.getLogger("nanoactor.models.cpu")


class CPUDevice(PortableOperators):
    """The host's CPU, with all operators from PyTorch."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._base = 0
        native = self.supports(torch.bfloat16)
        self.traits = DeviceTraits(
            name="cpu",
            collective_backend="gloo",
            default_dtype=torch.bfloat16 if native else torch.float32,
            default_block_size=16,
            default_memory_utilization=0.4,
            shared_memory=True,
            asynchronous=False,
        )

    def prepare_thread(self, threads: int) -> None:
        """Set PyTorch's number of threads for the calling thread."""
        torch.set_num_threads(threads)

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True for float32, and for bfloat16 if the processor can multiply it natively."""
        if dtype == torch.bfloat16:
            return has_instructions("avx512_bf16", "amx_bf16", "bf16")
        return dtype == torch.float32

    def memory(self) -> Memory:
        """Return the total and available memory in bytes of the host, or of its container (cgroup)
        if that has less."""
        total = _kibibytes("/proc/meminfo", "MemTotal") * 1024
        free = _kibibytes("/proc/meminfo", "MemAvailable") * 1024
        limit, used = _cgroup("memory.max"), _cgroup("memory.current")
        if limit is not None:
            total = min(total, limit)
            free = min(free, limit - (used or 0))
        return Memory(total, max(0, free))

    def reset_peak_memory(self) -> None:
        """Reset the peak memory of this process that Linux records, and store the current usage."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._base = _kibibytes("/proc/self/status", "VmRSS") * 1024
        except OSError:  # /proc is read-only: only growth above the old peak is visible
            self._base = _kibibytes("/proc/self/status", "VmHWM") * 1024

    def peak_memory(self) -> int:
        """Return the process's peak memory since `reset_peak_memory`, minus its memory at that
        call, in bytes."""
        return max(0, _kibibytes("/proc/self/status", "VmHWM") * 1024 - self._base)

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in ordinary memory; the CPU needs no pinned memory."""
        return torch.empty(shape, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on freshly mapped pages, which use no physical memory until they
        are written.

        `torch.zeros` would write all pages, which takes seconds and may waste gigabytes.
        """
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)

    def timed_event(self) -> HostEvent:
        """Return an event that reads the host's clock."""
        return HostEvent()

    def synchronize(self) -> None:
        """Return at once, because the CPU never queues work."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a linear operator whose weight is reordered into oneDNN's layout once, not in
        every call."""
        dense = dense_of(weights)
        bias = dense.bias
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(dense.weight)
        except (AttributeError, RuntimeError) as error:  # a build of PyTorch without oneDNN
            _log_once(
                f"weights cannot be packed for oneDNN, which costs up to half of the speed: {error}"
            )
            return super().linear(dense)
        apply = torch.ops.mkldnn._linear_pointwise
        return lambda x: apply(x, packed, bias, "none", [], "")


def has_instructions(*names: str) -> bool:
    """Return True if the processor has at least one of these instruction sets, named as in Linux's
    /proc/cpuinfo."""
    flags = _first_line("/proc/cpuinfo", "flags") + _first_line("/proc/cpuinfo", "Features")
    return any(name in flags.split() for name in names)


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)


def _first_line(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(key)), "")


def _kibibytes(path: str, key: str) -> int:
    words = _first_line(path, key + ":").split()
    return int(words[1]) if len(words) > 1 else 0


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
