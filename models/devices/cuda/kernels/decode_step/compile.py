"""Compilation of the decode step kernel to machine code."""

from __future__ import annotations

from nanoactor.models.devices.cuda.kernels import nvrtc
from nanoactor.models.devices.cuda.kernels.decode_step.sources import KERNEL, source_of
from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape


def load_or_compile(shape: Shape) -> nvrtc.CompiledCode:
    """Return the kernel's machine code for a shape, from disk or newly compiled and stored.

    Compiling takes one to three seconds. Raises `CompileError` if it fails.
    """
    return nvrtc.load_or_compile(source_of(shape), KERNEL)
