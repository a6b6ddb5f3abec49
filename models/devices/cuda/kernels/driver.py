"""Loading and launching of kernels, and tensor maps, through the CUDA driver API in PyTorch's
context."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

MAP_BYTES = 128
"""Size of a tensor map in bytes."""


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise DriverError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def tensor_map(
    kind: str, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """Return an encoded tensor map, which describes an array to the copy engine (TMA).

    The copy engine swizzles 16-byte chunks (chunk ^ row) within 128 bytes. `sizes` and `box` count
    elements of type `kind`, innermost dimension first. `strides` are in bytes, for all dimensions
    but the first. Raises `DriverError` if encoding fails.
    """
    driver = _driver()
    uint64, uint32 = driver.cuuint64_t, driver.cuuint32_t
    encoded = _check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            len(sizes),
            address,
            [uint64(size) for size in sizes],
            [uint64(stride) for stride in strides],
            [uint32(size) for size in box],
            [uint32(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


class Module:
    """Machine code that is loaded on the device."""

    def __init__(self, cubin: bytes) -> None:
        """Load the machine code in `cubin`. Raises `DriverError` if that fails."""
        self._module = _check(_driver().cuModuleLoadData(cubin))

    def kernel(self, name: str, blocks: int, threads: int, shared_bytes: int) -> Kernel:
        """Return the kernel called `name`, with its launch configuration.

        It runs with `threads` threads per block, `shared_bytes` bytes of shared memory per block,
        and `blocks` blocks unless a launch specifies a different number. Raises `DriverError` if a
        driver call fails.
        """
        driver = _driver()
        function = _check(driver.cuModuleGetFunction(self._module, name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, shared_bytes))
        return Kernel(self, function, blocks, threads, shared_bytes)


class Kernel:
    """A kernel of a loaded module, with its launch configuration."""

    def __init__(
        self, module: Module, function: Any, blocks: int, threads: int, shared_bytes: int
    ) -> None:
        self._module = module  # keeps the code loaded
        self._function = function
        driver = _driver()
        cooperative, overlapping = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        cooperative.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        overlapping.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlapping.value.programmaticStreamSerializationAllowed = 1
        self._make_config = functools.partial(_launch_config, blocks, threads, shared_bytes)
        self._overlap_attribute = overlapping
        self._config = self._make_config([])
        self._overlapping = self._make_config([overlapping])
        self._clustered: dict[int, Any] = {}
        """Launch configurations by the number of blocks in a cluster."""
        self._cooperative = self._make_config([cooperative])

    def launch(
        self, args: ctypes.Structure, blocks: int, overlaps: bool = False, cluster: int = 1
    ) -> None:
        """Queue the kernel with `blocks` thread blocks on the current stream. The launch can be
        captured in a graph.

        If `overlaps` is True, the blocks may start before the previous kernel has ended, and wait
        for it by themselves (programmatic dependent launch). If `cluster` is not 1, they do, and
        every `cluster` blocks run at the same time and can read each other's shared memory. Raises
        `DriverError` if the launch fails.
        """
        config = self._overlapping if overlaps else self._config
        if cluster > 1:
            config = self._config_of(cluster)
        config.gridDimX = blocks
        self._queue(config, args)

    def max_clusters(self, cluster: int) -> int:
        """Return the number of clusters of `cluster` blocks that can run at the same time. Raises
        `DriverError` if the driver call fails."""
        config = self._config_of(cluster)
        config.gridDimX = cluster
        return int(_check(_driver().cuOccupancyMaxActiveClusters(self._function, config)))

    def _config_of(self, cluster: int) -> Any:
        """Return the launch configuration for clusters of `cluster` blocks."""
        if cluster not in self._clustered:
            driver = _driver()
            dimension = driver.CUlaunchAttribute()
            dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = dimension.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            self._clustered[cluster] = self._make_config([self._overlap_attribute, dimension])
        return self._clustered[cluster]

    def launch_cooperative(self, args: ctypes.Structure) -> None:
        """Queue a cooperative launch, in which all blocks run at the same time, on the current
        stream.

        The launch can be captured in a graph. Raises `DriverError` if the launch fails.
        """
        self._queue(self._cooperative, args)

    def _queue(self, config: Any, args: ctypes.Structure) -> None:
        driver = _driver()
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


def _launch_config(blocks: int, threads: int, shared_bytes: int, attributes: list[Any]) -> Any:
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
