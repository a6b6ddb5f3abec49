"""Kernels and tensor maps through the driver API, in torch's own context."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from nanoactor.models.devices.cuda.kernels.decode_step.arguments import MAP_BYTES
from nanoactor.models.devices.cuda.kernels.decode_step.sources import KERNEL
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    UNIT_BYTES,
    WARPS,
    Shape,
    layout_of,
)

_ALIGNING = 1024
"""Bytes reserved to align shared memory."""


class DriverError(RuntimeError):
    """A call of the driver failed."""


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise DriverError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def map_of(matrix: torch.Tensor, box: int) -> bytes:
    """Describe a row-major matrix of bfloat16 or e4m3 to the copy engine, to be read in boxes of 8
    rows and `box` units of 128 bytes.

    A map of three dimensions (columns of a unit, rows, units) loads one box of up to 16 KB with
    one instruction, with its 16-byte chunks swizzled to avoid bank conflicts.
    """
    driver = _driver()
    rows, columns = matrix.shape
    assert matrix.is_contiguous()
    size, unit = matrix.itemsize, UNIT_BYTES // matrix.itemsize
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[matrix.dtype]
    wide = driver.cuuint64_t
    small = driver.cuuint32_t
    made = _check(
        driver.cuTensorMapEncodeTiled(
            kind,
            3,
            matrix.data_ptr(),
            [wide(unit), wide(rows), wide(columns // unit)],
            [wide(columns * size), wide(UNIT_BYTES)],
            [small(unit), small(8), small(box)],
            [small(1), small(1), small(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(made.getPtr(), MAP_BYTES)


class Kernel:
    """A kernel that is loaded on the device."""

    def __init__(self, cubin: bytes, shape: Shape) -> None:
        """Load the kernel. Raises `DriverError`."""
        driver = _driver()
        self._blocks = shape.blocks
        self._shared = layout_of(shape).total + _ALIGNING
        self._module = _check(driver.cuModuleLoadData(cubin))
        self._function = _check(driver.cuModuleGetFunction(self._module, KERNEL.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, limit, self._shared))

    def launch(self, args: ctypes.Structure) -> None:
        """Queue on the current stream, all blocks at once or none (cooperative); capturable."""
        driver = _driver()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * WARPS + 128, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))
