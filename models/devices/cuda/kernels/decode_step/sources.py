"""The CUDA source of a kernel: instruction wrappers, constants, then the parts, each of which
builds on the previous ones."""

from __future__ import annotations

from pathlib import Path

from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape, constants
from nanoactor.models.devices.cuda.kernels.nvrtc import MACHINE_SOURCE

PARTS = (
    "arguments.cuh", "handover.cuh", "choice.cuh", "ring.cuh", "product.cuh", "attention.cuh",
    "experts.cuh", "step.cu",
)  # fmt: skip
KERNEL = "decode_step"


def source_of(shape: Shape, machine: Path | None = None) -> str:
    """Return the whole source, in which compiler errors name each part's own lines. `machine`
    replaces the file of the instruction wrappers."""
    folder = Path(__file__).parent
    parts = [machine or MACHINE_SOURCE, *(folder / part for part in PARTS)]
    texts = [f'#line 1 "constants"\n{constants(shape)}']
    texts += [f'#line 1 "{part.name}"\n{part.read_text()}' for part in parts]
    return "\n".join([texts[1], texts[0], *texts[2:]])
