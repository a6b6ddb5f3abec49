"""Kernels in CUDA C++ that may be unavailable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from nanoactor.models.devices.cuda.kernels.driver import DriverError
from nanoactor.models.devices.cuda.kernels.nvrtc import CompileError

CAPABILITY = (9, 0)
"""The only compute capability for which these kernels are compiled."""
KernelsT = TypeVar("KernelsT")


class OptionalKernels(Generic[KernelsT]):
    """The kernels of a device, which are loaded when they are first needed."""

    def __init__(
        self,
        capability: tuple[int, int],
        load: Callable[[], KernelsT],
        log_fallback: Callable[[str], None],
    ) -> None:
        """`load` returns the kernels of a device with compute capability `CAPABILITY`. If it raises
        `CompileError` or `DriverError`, `log_fallback` is called once, with the reason."""
        self._is_enabled = capability == CAPABILITY
        self._load, self._log_fallback = load, log_fallback
        self._kernels: KernelsT | None = None

    def get(self) -> KernelsT | None:
        """Return the kernels, or None if they are not available."""
        if self._is_enabled and self._kernels is None:
            try:
                self._kernels = self._load()
            except (CompileError, DriverError) as error:
                self._is_enabled = False
                self._log_fallback(str(error))
        return self._kernels
