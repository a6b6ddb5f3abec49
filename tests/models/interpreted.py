"""The CUDA device's kernels in Triton's interpreter: all of its logic on a CPU, slowly.

Its queue is the calling thread, a captured step is run anew by each replay. bfloat16 products are
wrong in the interpreter, so nothing here is tried in that type.
"""

import dataclasses

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from nanoactor.models.devices.cuda.device import PORTABLE_TRAITS, CUDADevice, with_kernels
from nanoactor.models.devices.cuda.kernels.fp8_products import launch as fp8_products
from nanoactor.models.devices.cuda.kernels.prefill import PrefillAttention
from nanoactor.models.devices.portable import HostEvent
from nanoactor.models.seq_lens import NO_SEQ_LENS
from tests.models.host_machine import HostMachine


def _patch_once_a_launch():
    """Have Triton's language replaced once for each launch of a kernel and each of its modules.

    The interpreter looks for what to replace at every call of a function within a kernel, in every
    program of its grid: a third of the time that these tests take.
    """
    patch, run, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        # What is replaced depends on the modules that a function sees, and on nothing else.
        if (seen := id(function.__globals__)) in patched:
            return None
        patched.add(seen)
        return patch(function)

    def run_one(executor, *args, **kwargs):
        patched.clear()  # the launch before has put back what it had replaced
        return run(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_one


_patch_once_a_launch()


def _make_indices_of_arrays():
    """Before version 3.7, Triton applies `int` to arrays of one number, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


if triton.__version__.startswith("3.6."):
    _make_indices_of_arrays()


def _round_to_e4m3_as_gpus_do():
    """The interpreter loses the carry where a mantissa rounds up to the next power of two."""
    convert = interpreter._convert_float

    def converted(numbers, source, target, mode):
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(numbers, source, target, mode)
        given = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        rounded = given.clamp(-448, 448).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy().reshape(numbers.shape)

    interpreter._convert_float = converted


_round_to_e4m3_as_gpus_do()


def by_tma(variants, multiprocessors=0):
    """Attention of prompts as on a Hopper GPU, in any type and over blocks of any size."""
    attention = PrefillAttention((9, 0), multiprocessors, variants)
    attention.unsupported_reason = lambda *_: None
    return attention


class Rerun:
    """What a graph's replay does: the same function into the same memory."""

    def __init__(self, function):
        self._function = function
        self._result = function(NO_SEQ_LENS)

    def replay(self, lengths):
        return self._result.copy_(self._function(lengths))


class InterpretedDevice(HostMachine, CUDADevice):
    def __init__(self):
        self._base = 0
        self.traits = dataclasses.replace(
            with_kernels(PORTABLE_TRAITS),
            name="interpreted",
            collective_backend=self.collective_backend,
            default_dtype=self.default_dtype,
            default_block_size=16,
        )
        self.prefill_attention = PrefillAttention((8, 0), 0)
        self._multiplies_fp8 = True
        self._fp8_products = fp8_products.optional_kernels((8, 9))
        self._expert_kernels = None

    def supports(self, dtype):
        return dtype == torch.float32

    def timed_event(self):
        return HostEvent()

    def capture(self, function, lengths, turns):
        return Rerun(function)
