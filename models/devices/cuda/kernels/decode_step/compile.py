"""Machine code of the kernel of a whole decode step."""

from __future__ import annotations

from nanoactor.models.devices.cuda.kernels import nvrtc
from nanoactor.models.devices.cuda.kernels.decode_step.sources import KERNEL, source_of
from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape


def load_or_compile(shape: Shape) -> nvrtc.CompiledCode:
    """Read the kernel from disk, or compile and store it, which takes one to three seconds. Raises
    `CompileError` if that fails."""
    return nvrtc.load_or_compile(source_of(shape), KERNEL)
