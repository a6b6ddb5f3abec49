"""The kernels of products in CUDA C++, compiled for the CPU: a fiber for each thread of the GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
from types import ModuleType

from nanoactor.models.devices.cuda.kernels.expert_products import experts as expert_products
from nanoactor.models.devices.cuda.kernels.fp8_products import variants as fp8_products
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import RoundArgs
from nanoactor.models.devices.cuda.kernels.fp8_products.variants import ROUNDING, ROUNDING_THREADS
from nanoactor.models.devices.cuda.kernels.tiles import Args, Variant
from tests.models.decode_step.emulated import FOLDER, library_of


@functools.cache
def build(
    sources: ModuleType,
    kernel: str,
    threads: int,
    blocks: int,
    edits: tuple[tuple[str, str], ...] = (),
) -> ctypes.CDLL:
    """Compile one kernel for `blocks` blocks; `edits` plant bugs: (text, what it becomes)."""
    text = sources.source((FOLDER / "machine.h").read_text())
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


def mapped(kind, address, sizes, strides, box):
    """Stand in for `tensor_map`."""
    assert (kind, sizes[0], box) == ("UINT8", strides[0], (128, 128))
    return map_of(address, sizes[1], sizes[0] // 128)


class Hang(Exception):
    """A kernel has not ended."""


class _Emulated:
    sources: ModuleType

    def __init__(self, processors: int, edits: tuple[tuple[str, str], ...] = ()) -> None:
        self.processors, self.edits, self.seed = processors, edits, 0
        self.clusters = tuple(processors // size for size in range(1, 9))
        self.ran: list[Variant] = []

    def get(self) -> _Emulated:
        """Stand in for `OptionalKernels`, too."""
        return self

    def multiply(self, variant: Variant, args: Args, blocks: int) -> None:
        self.ran.append(variant)
        self._run(variant.name, variant.threads, blocks, args)

    def _run(self, kernel: str, threads: int, blocks: int, args: ctypes.Structure) -> None:
        library = build(self.sources, kernel, threads, blocks, self.edits)
        size = ctypes.sizeof(args)
        assert size == library.args_bytes(), "the driver copies as many bytes as the kernel takes"
        room = (ctypes.c_ubyte * (size + 64))()
        aligned = (ctypes.c_ubyte * size).from_buffer(room, -ctypes.addressof(room) % 64)
        ctypes.memmove(aligned, ctypes.addressof(args), size)
        self.seed += 1
        if library.run_step(ctypes.byref(aligned), self.seed):
            raise Hang


class EmulatedKernels(_Emulated):
    """Stands in for the kernels of FP8 products."""

    sources = fp8_products

    def round(self, args: RoundArgs) -> None:
        self._run(ROUNDING, ROUNDING_THREADS, 2, args)


class EmulatedExpertKernels(_Emulated):
    """Stands in for the kernels of experts in bfloat16."""

    sources = expert_products
