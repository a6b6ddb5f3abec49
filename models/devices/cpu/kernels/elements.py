"""Access to float32 and bfloat16 elements by address, and helpers for compiling kernels.

Kernels receive addresses, because a torch tensor returns its address in 0.1 us and Numba has no
bfloat16. The type of a kernel's last argument, `like`, is that of the elements: float32, or uint16
for the bits of bfloat16. Arithmetic is in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

log = logging.getLogger("nanoactor.models.cpu")

FLOAT32 = np.float32(0)
"""Value of `like` for float32 elements."""
BFLOAT16 = np.uint16(0)
"""Value of `like` for bfloat16 elements."""
_LIKE_BY_DTYPE: dict[torch.dtype, np.generic] = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
INT32 = np.int32(0)
INT64 = np.int64(0)

_MIN_PARALLEL_ELEMENTS = 1 << 18
"""Minimum number of elements for which it is worthwhile to wake other threads."""

# One of Numba's threading layers terminates the process if two threads use it at once.
_launch_lock = threading.Lock()

# None of these fast-math flags assumes finite numbers, as kernels check for NaN and infinity.
_FASTMATH_FLAGS = {"reassoc", "contract", "nsz", "arcp"}


def has_supported_dtype(x: torch.Tensor) -> bool:
    """Return True if the kernels support the dtype of this tensor."""
    return x.dtype in _LIKE_BY_DTYPE


def like_of(x: torch.Tensor) -> np.generic:
    """Return the value of `like` for a tensor's elements."""
    return _LIKE_BY_DTYPE[x.dtype]


def launch(kernels: tuple[Any, Any], threads: int, elements: int, *arguments: Any) -> None:
    """Run one of a pair of kernels created by `serial_and_parallel`: the parallel one if there is
    more than one thread and there are enough elements."""
    if threads == 1 or elements < _MIN_PARALLEL_ELEMENTS:
        kernels[0](*arguments)
    else:
        with _launch_lock:
            kernels[1](*arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """A function that Numba compiles, for one thread or for several, and its signature."""

    function: Any
    arguments: tuple[Any, ...]
    """Numba types of all arguments except the last, `like`."""
    parallel: bool
    purpose: str
    """Kind of work for which the kernel is needed: `STEPS`, `LOGITS`, `EXPERTS`, `FP8` or
    `FP8_EXPERTS`."""


STEPS, LOGITS, EXPERTS, FP8, FP8_EXPERTS = "steps", "logits", "experts", "FP8", "FP8 experts"
"""Kinds of work that need kernels. `STEPS` and `LOGITS` are needed by all models; `LOGITS` is
separate because logits may be float32 although the model is not."""
_kernels: list[_Kernel] = []


def compile_kernels(
    dtype: torch.dtype, parallel: bool, purposes: Collection[str] = (STEPS, LOGITS)
) -> None:
    """Compile the kernels for this dtype, or load them from disk, so that no step waits for
    compilation.

    Only kernels for the listed `purposes` are compiled, and multithreaded ones only if `parallel`
    is True. Unsupported dtypes are ignored.
    """
    if dtype not in _LIKE_BY_DTYPE:
        return
    like = numba.typeof(_LIKE_BY_DTYPE[dtype])
    for kernel in _kernels:
        if (parallel or not kernel.parallel) and kernel.purpose in purposes:
            kernel.function.compile((*kernel.arguments, like))
            if kernel.function.stats.cache_misses:
                _log_once(f"compiling kernels for {dtype}; this happens once and takes about 15 s")


def kernel(
    scalars: str, parallel: bool = False, purpose: str = STEPS
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that compiles a function with Numba when it is first called, or in
    `compile_kernels`, and caches it on disk.

    `scalars` has one letter for each argument except `like`: `a` for an address, `n` for an
    integer, `f` for a float. If `parallel` is True, `prange` loops are divided among threads.
    """

    def decorate(function: Callable[..., None]) -> Any:
        options = {"nogil": True, "fastmath": _FASTMATH_FLAGS, "error_model": "numpy"}
        try:
            compiled = numba.njit(cache=True, parallel=parallel, **options)(function)
        except RuntimeError as error:  # neither our folder nor the user's cache is writable
            _log_once(
                "compiled kernels cannot be cached, so each start compiles them again, which takes "
                f"about 10 s: {error}"
            )
            compiled = numba.njit(parallel=parallel, **options)(function)
        arguments = tuple(types.float64 if kind == "f" else types.int64 for kind in scalars)
        _kernels.append(_Kernel(compiled, arguments, parallel, purpose))
        return compiled

    return decorate


def serial_and_parallel(
    scalars: str, purpose: str = STEPS
) -> Callable[[Callable[..., None]], tuple[Any, Any]]:
    """Return a decorator that compiles a function twice, and returns the pair for `launch`: the
    kernel for one thread, and the kernel for several."""

    def decorate(function: Callable[..., None]) -> tuple[Any, Any]:
        # Numba looks up cached code by a function's name and line.
        name = f"{function.__name__}_parallel"
        twin = FunctionType(function.__code__, function.__globals__, name)
        twin.__qualname__ = name
        compile_serial, compile_parallel = (
            kernel(scalars, parallel, purpose) for parallel in (False, True)
        )
        return compile_serial(function), compile_parallel(twin)

    return decorate


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)


# Decorators of functions that are called from kernels and inlined there.
inlined = numba.njit(fastmath={"contract"}, error_model="numpy")
inlined_reordered = numba.njit(fastmath=_FASTMATH_FLAGS, error_model="numpy")


@intrinsic
def _pointer(typing_context, address, like):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@inlined
def view(address, shape, like):
    """Return the memory at an address as a contiguous array with the element type of `like`."""
    return numba.carray(_pointer(address, like), shape)


@intrinsic
def bits_of(typing_context, value):
    """Return the bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing_context, bits):
    """Return the float32 with these uint32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def widen(typing_context, value):
    """Return an element (float32, or the bits of a bfloat16) as float32."""

    def generate(context, builder, signature, arguments):
        if signature.args[0] == types.float32:
            return arguments[0]
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(word.type, 16)), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def _is_float(typing_context, like):
    def generate(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(1), int(signature.args[0] == types.float32))

    return types.boolean(like), generate


@intrinsic
def _as_element(typing_context, value, bits, like):
    """Return `value` if `like` is a float32, else the low 16 bits of `bits`."""

    def generate(context, builder, signature, arguments):
        if signature.return_type == types.float32:
            return arguments[0]
        return builder.trunc(arguments[1], ir.IntType(16))

    return like(types.float32, types.uint32, like), generate


@intrinsic
def prefetch(typing_context, address):
    """Prefetch the cache line at an address."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@inlined
def narrow(value, like):
    """Return a float32 value rounded to the element type of `like` (to nearest, ties to even). NaN
    stays NaN."""
    bits = bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        rounded = np.uint32(0x7FC0)
    return _as_element(value, np.uint32(rounded), like)


@inlined
def finite_or_zero(value):
    """Return the value, or 0 for NaN and infinities."""
    exponent = np.uint32(0x7F800000)
    return value if bits_of(value) & exponent != exponent else np.float32(0)


_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)


@inlined
def exp(x):
    """Return e^x in float32 with an error of at most 2 ulp. `x` is first clamped to [-87, 88].

    No function is called, so loops that use `exp` vectorize. x = n ln 2 + r with |r| <= 0.35. e^r
    is computed as its Taylor series up to the 7th power, and n is added to the exponent bits (W. J.
    Cody and W. Waite, "Software manual for the elementary functions", 1980).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(0.5)
    series = series * r * r + r + np.float32(1)
    return series * float_of(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
