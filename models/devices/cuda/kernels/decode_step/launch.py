"""Loading of the decode step kernel, and the tensor maps through which it reads matrices."""

from __future__ import annotations

import torch

from nanoactor.models.devices.cuda.kernels.decode_step.sources import KERNEL
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    UNIT_BYTES,
    WARPS,
    Shape,
    layout_of,
)
from nanoactor.models.devices.cuda.kernels.driver import Kernel, Module, tensor_map

_ALIGNMENT_BYTES = 1024
"""Number of bytes of shared memory reserved for alignment."""
_MAP_DTYPES = {torch.bfloat16: "BFLOAT16", torch.float8_e4m3fn: "UINT8"}


def encode_map(matrix: torch.Tensor, box: int) -> bytes:
    """Return the tensor map of a contiguous bfloat16 or e4m3 matrix, which is read in boxes of 8
    rows and `box` units of 128 bytes.

    The map has three dimensions (columns of a unit, rows, units). One instruction loads a box of up
    to 16 KiB, and the 16-byte chunks are swizzled to avoid bank conflicts.
    """
    rows, columns = matrix.shape
    assert matrix.is_contiguous()
    size, unit = matrix.itemsize, UNIT_BYTES // matrix.itemsize
    return tensor_map(
        _MAP_DTYPES[matrix.dtype],
        matrix.data_ptr(),
        sizes=(unit, rows, columns // unit),
        strides=(columns * size, UNIT_BYTES),
        box=(unit, 8, box),
    )


def load_kernel(cubin: bytes, shape: Shape) -> Kernel:
    """Load the machine code of a decode step kernel on the device. Raises `DriverError` if that
    fails."""
    shared_bytes = layout_of(shape).total + _ALIGNMENT_BYTES
    return Module(cubin).kernel(KERNEL, shape.blocks, 32 * WARPS + 128, shared_bytes)
