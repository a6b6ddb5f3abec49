"""The kernel's own source, compiled for the CPU: a fiber for each thread of the GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from bench.decode_step_reference import EPS
from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import (
    Scratch,
    StepInputs,
    arguments_of,
    lay_out_scales,
)
from nanoactor.models.devices.cuda.kernels.decode_step.sources import KERNEL, source_of
from nanoactor.models.devices.cuda.kernels.decode_step.table import (
    LOGITS,
    UNIT_BYTES,
    Shape,
    product_of,
)
from nanoactor.models.weights.whole_step import ModelWeights, flat_matrix

FOLDER = Path(__file__).parent


@functools.cache
def build(shape: Shape, edits: tuple[tuple[str, str], ...] = ()) -> ctypes.CDLL:
    """Compile; `edits` plant bugs: (text, what it becomes)."""
    source = source_of(shape, FOLDER / "machine.h")
    for old, new in edits:
        assert source.count(old) >= 1, old
        source = source.replace(old, new)
    # A round of all fibers is a poll: be less patient.
    source = source.replace("(++polls & 0xffff)", "(++polls & 0xfff)")
    source += f"#define KERNEL {KERNEL}\n#define ALL_THREADS (THREADS + 128)\n"
    source += "#define MOST_ROUNDS ~0ull\n"  # a step notices by itself that it hangs
    return library_of(source + (FOLDER / "run.h").read_text())


def library_of(source: str) -> ctypes.CDLL:
    """Compile an emulated kernel."""
    # What lies askew is told on standard error; a GPU would stop.
    flags = "-std=c++17 -O1 -w -Wno-psabi -shared -fPIC -fsanitize=alignment -static-libubsan"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.cpp").write_text(source)
        command = ["g++", *flags.split(), "step.cpp", "-o", "step.so"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(str(folder / "step.so"))


def map_of(matrix: torch.Tensor, box: int) -> bytes:
    """Describe a matrix to the emulated copy engine."""
    assert matrix.is_contiguous()
    rows, columns = matrix.shape
    units = columns * matrix.itemsize // UNIT_BYTES
    return struct.pack("16Q", matrix.data_ptr(), rows, units, box, *[0] * 12)


class Emulated:
    """A step that can be run again and again."""

    def __init__(
        self,
        shape: Shape,
        weights: ModelWeights,
        caches: list[KVCache],
        inputs: StepInputs,
        edits: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._library = build(shape, edits)
        self.scratch = Scratch(shape, torch.device("cpu"))
        self.scratch.hidden.fill_(torch.nan)
        self.scratch.logits.fill_(torch.nan)
        self.status = torch.zeros(2, dtype=torch.int32)
        boxes = {p.matrix: product_of(shape, p).box for p in (*shape.phases, LOGITS) if p.matrix}
        maps = [
            map_of(flat_matrix(getattr(layer, p.matrix)), boxes[p.matrix])
            for layer in weights.layers
            for p in shape.phases
            if p.matrix
        ]
        maps.append(map_of(weights.head, boxes["head"]))
        scales = lay_out_scales(shape, weights)
        self._keep = weights, caches, inputs, scales
        self._args = arguments_of(
            shape, weights, caches, inputs, self.scratch, maps, scales, self.status, EPS,
            wait_timeout=2e-5,
        )  # fmt: skip

    def __call__(self, seed: int = 0) -> bool:
        """Run a step; returns whether it ended."""
        return not self._library.run_step(ctypes.byref(self._aligned()), seed)

    def _aligned(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Return the parameters where the struct's alignment wants them."""
        size = ctypes.sizeof(self._args)
        assert size >= self._library.args_bytes(), "the driver would copy more than there is"
        self._room = (ctypes.c_ubyte * (size + 64))()
        offset = -ctypes.addressof(self._room) % 64
        room = (ctypes.c_ubyte * size).from_buffer(self._room, offset)
        ctypes.memmove(room, ctypes.addressof(self._args), size)
        return room
