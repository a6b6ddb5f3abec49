"""Programmatic dependent launch of Triton kernels: a kernel's programs start while the previous
kernel on the stream ends, and wait for its results.

This hides most of the time between two kernels. Every kernel that is launched with these options
must call `await_previous` first, in all programs, because its own results must not be read before
those of all earlier kernels. Source: CUDA C++ Programming Guide, section "Programmatic Dependent
Launch and Synchronization".
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CAPABILITY = (9, 0)
"""Lowest compute capability that supports it."""


@triton.jit
def await_previous(overlaps: tl.constexpr):
    """Wait until the previous kernel has ended, and let the next one start."""
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def dependent_launch() -> dict[str, bool]:
    """Return the launch options of kernels that call `await_previous`, on the current device."""
    is_interpreted = not isinstance(await_previous, triton.JITFunction)
    if is_interpreted or torch.cuda.get_device_capability() < _CAPABILITY:
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
