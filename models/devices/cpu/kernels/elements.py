"""Float32 and bfloat16 elements that kernels read and write at an address.

Kernels are passed addresses, because a torch tensor returns its address in 0.1 us and Numba has no
bfloat16. The type of the last argument, `like`, is the type of the elements: float32, or uint16 for
the bits of bfloat16. Arithmetic is in float32.
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
"""Value of `like` for float32."""
BFLOAT16 = np.uint16(0)
"""Value of `like` for bfloat16."""
_LIKE_BY_DTYPE: dict[torch.dtype, np.generic] = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
INT32 = np.int32(0)
INT64 = np.int64(0)

_MIN_PARALLEL_ELEMENTS = 1 << 18
"""Minimum number of elements for which waking up a second thread is worthwhile."""

# One of Numba's threading layers terminates the process if two threads use it at once.
_launch_lock = threading.Lock()

# None of these fast-math flags assumes finite numbers, as kernels check for NaN and infinity.
_FASTMATH_FLAGS = {"reassoc", "contract", "nsz", "arcp"}


def has_supported_dtype(x: torch.Tensor) -> bool:
    """Return True if kernels support elements of this tensor's dtype."""
    return x.dtype in _LIKE_BY_DTYPE


def like_of(x: torch.Tensor) -> np.generic:
    """Return the value of `like` for a tensor's elements."""
    return _LIKE_BY_DTYPE[x.dtype]


def launch(kernels: tuple[Any, Any], threads: int, elements: int, *arguments: Any) -> None:
    """Run a kernel pair created by `serial_and_parallel`. Use `threads` threads if there are enough
    elements, and one otherwise."""
    if threads == 1 or elements < _MIN_PARALLEL_ELEMENTS:
        kernels[0](*arguments)
    else:
        with _launch_lock:
            kernels[1](*arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """A function that Numba compiles, for one thread or for several."""

    function: Any
    arguments: tuple[Any, ...]
    """Numba types of all arguments except the last."""
    parallel: bool
    purpose: str
    """One of `STEPS`, `LOGITS`, `EXPERTS`, `FP8` and `FP8_EXPERTS`."""


STEPS, LOGITS, EXPERTS, FP8, FP8_EXPERTS = "steps", "logits", "experts", "FP8", "FP8 experts"
"""Purposes of kernels: steps of all models; logits, which are float32 if a step has changed them;
mixtures of experts; FP8 weights; mixtures of experts with FP8 weights."""
_kernels: list[_Kernel] = []


def compile_kernels(
    dtype: torch.dtype, parallel: bool, purposes: Collection[str] = (STEPS, LOGITS)
) -> None:
    """Compile the kernels for this dtype, or load them from disk, so that no step waits for
    compilation. Kernels that only some models call are compiled when such a model is loaded."""
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
    """Return a decorator that compiles a function when it is first called, or in `compile_kernels`,
    and caches it on disk. `scalars` gives the types of the function's arguments except `like`: `a`
    for an address, `n` for an integer, `f` for a float. With `parallel`, its `prange` loops are
    spread over threads."""

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
    """Return a decorator that compiles a function both for one thread and for several."""

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
    """Return the memory at an address as a contiguous array."""
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
    """Return an element as float32."""

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
    """Return `value` itself or the low 16 bits of `bits`, depending on the type of `like`."""

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
    """Round a float32 to an element: to nearest, ties to even; NaN stays NaN."""
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
    """Return e^x in float32 to within 2 ulp, without a function call, so that loops over it
    vectorize.

    x = n ln 2 + r. e^r is its Taylor series up to the 7th power, with |r| <= 0.35, and n is added
    to the exponent bits (W. J. Cody and W. Waite, "Software manual for the elementary functions",
    1980).
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
