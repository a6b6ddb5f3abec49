"""The kernels of FP8 products, compiled for the CPU: a fiber for each thread of the GPU."""

from __future__ import annotations

import ctypes
import functools
import struct

from nanoactor.models.devices.cuda.kernels.fp8_products.launch import Args, RoundArgs
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import (
    ROUNDING,
    ROUNDING_THREADS,
    Variant,
    source,
)
from tests.models.decode_step.emulated import FOLDER, library_of


@functools.cache
def build(
    kernel: str, threads: int, blocks: int, edits: tuple[tuple[str, str], ...] = ()
) -> ctypes.CDLL:
    """Compile one kernel for `blocks` blocks; `edits` plant bugs: (text, what it becomes)."""
    text = source((FOLDER / "machine.h").read_text())
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    if kernel == ROUNDING:
        text += "#define Args RoundArgs\n"
    text += f"constexpr int BLOCKS = {blocks};\n#define KERNEL {kernel}\n"
    text += f"#define ALL_THREADS {threads}\n#define MOST_ROUNDS 100000\n"
    return library_of(text + (FOLDER / "run.h").read_text())


def map_of(address: int, rows: int, units: int) -> bytes:
    """Describe a matrix of `units` units of 128 bytes to the emulated copy engine."""
    return struct.pack("16Q", address, rows, units, 128, *[0] * 12)


class Hang(Exception):
    """A kernel has not ended."""


class EmulatedKernels:
    """Stands in for `Kernels`."""

    def __init__(self, processors: int, edits: tuple[tuple[str, str], ...] = ()) -> None:
        self.processors, self.edits, self.seed = processors, edits, 0
        self.clusters = tuple(processors // size for size in range(1, 9))
        self.ran: list[Variant] = []

    def multiply(self, variant: Variant, args: Args, blocks: int) -> None:
        self.ran.append(variant)
        self._run(build(variant.name, variant.threads, blocks, self.edits), args)

    def round(self, args: RoundArgs) -> None:
        self._run(build(ROUNDING, ROUNDING_THREADS, 2, self.edits), args)

    def _run(self, library: ctypes.CDLL, args: ctypes.Structure) -> None:
        size = ctypes.sizeof(args)
        assert size == library.args_bytes(), "the driver copies as many bytes as the kernel takes"
        room = (ctypes.c_ubyte * (size + 64))()
        aligned = (ctypes.c_ubyte * size).from_buffer(room, -ctypes.addressof(room) % 64)
        ctypes.memmove(aligned, ctypes.addressof(args), size)
        self.seed += 1
        if library.run_step(ctypes.byref(aligned), self.seed):
            raise Hang
