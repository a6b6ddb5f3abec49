"""Compiles the CPU's kernels, which Numba then keeps on disk.

From a clean clone, each of the tests that are the first to compute would compile them all.
"""

import torch

import nanoactor.models.devices.cpu.compiled  # noqa: F401 - it imports every kernel
from nanoactor.models.devices.cpu.kernels.elements import (
    EXPERTS,
    FP8,
    FP8_EXPERTS,
    LOGITS,
    STEPS,
    compile_kernels,
)

for dtype in (torch.float32, torch.bfloat16):
    compile_kernels(dtype, parallel=True, purposes=(STEPS, LOGITS, EXPERTS, FP8, FP8_EXPERTS))
