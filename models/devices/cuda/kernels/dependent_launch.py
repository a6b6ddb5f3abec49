"""Programmatic dependent launch of Triton kernels: a kernel's programs may start before the
previous kernel on the stream has ended, and wait for its results.

This hides most of the time between two kernels. Every kernel that is launched with these options
must call `await_previous` in all programs, before it reads anything but weights, which no kernel
writes, and before it writes anything. The next kernel waits only for this one: if this one ended
without waiting, the next could read the results of an earlier kernel that is still running. Source:
CUDA C++ Programming Guide, section "Programmatic Dependent Launch and Synchronization".
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


def dependent_launch() -> dict[str, bool]:
    """Return the launch options of kernels that call `await_previous`, for the current device."""
    if not isinstance(await_previous, triton.JITFunction):  # in the interpreter
        return {"overlaps": False}
    return options_of(torch.cuda.current_device())


@functools.cache
def options_of(device: int) -> dict[str, bool]:
    """Return the launch options for a device."""
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
