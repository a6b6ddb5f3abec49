"""The CUDA source of the decode step kernel: instruction wrappers, constants, and then the parts,
each of which depends on the previous ones."""

from __future__ import annotations

from pathlib import Path

from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape, constants
from nanoactor.models.devices.cuda.kernels.nvrtc import MACHINE_SOURCE

PARTS = (
    "arguments.cuh", "handover.cuh", "choice.cuh", "ring.cuh", "product.cuh", "packed.cuh",
    "attention.cuh", "experts.cuh", "step.cu",
)  # fmt: skip
KERNEL = "decode_step"


def source_of(shape: Shape, machine: Path | None = None) -> str:
    """Return the complete source for a shape. Compiler errors refer to the file and line of each
    part.

    `machine` is a file that replaces the instruction wrappers; None means `machine.cuh`.
    """
    folder = Path(__file__).parent
    parts = [machine or MACHINE_SOURCE, *(folder / part for part in PARTS)]
    texts = [f'#line 1 "constants"\n{constants(shape)}']
    texts += [f'#line 1 "{part.name}"\n{part.read_text()}' for part in parts]
    return "\n".join([texts[1], texts[0], *texts[2:]])
