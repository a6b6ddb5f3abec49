"""Registers that are read before they are written, in machine code for sm_90.

Nothing in the hardware keeps an instruction from reading a register too early that another with a
fixed latency writes: the assembler counts the cycles between them. Once it counted on a wait for a
load that a predicate had switched off, and left 5 cycles between a zero (`CS2R`) and its reader
where it leaves 6 for stores and 8 for all others: a kernel read an old value now and then.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
from pathlib import Path

LEAST = 6
"""Cycles from a zero to who reads it."""
_FAR = 40
"""Instructions to look ahead: more than what 6 cycles hold."""
_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_ZERO = re.compile(r"(?:@!?U?P\d+ )?CS2R(\.32)? R(\d+), SRZ")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


def disassembler() -> Path:
    """Raises `PackageNotFoundError`."""
    wheel = importlib.metadata.distribution("nvidia-cuda-nvdisasm")
    return Path(str(wheel.locate_file("nvidia/cu13/bin/nvdisasm")))


def early_reads(cubin: Path) -> list[str]:
    """Return the zeros that are read too early, and by whom."""
    command = [str(disassembler()), "-c", "-hex", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return early_reads_of(listing)


def early_reads_of(listing: str) -> list[str]:
    """The same of what the disassembler says."""
    code = list(_instructions(listing.splitlines()))
    assert code, "nothing was disassembled"
    return [found for at in range(len(code)) if (found := _early_reader(code, at))]


def _instructions(lines: list[str]):
    """Yield (text, cycles until the next), the latter from the control bits 105 to 108."""
    for line, below in itertools.pairwise(lines):
        if (found := _LINE.match(line)) and (high := _WORD.search(below)):
            yield found[2], int(high[1], 16) >> 41 & 15


def _early_reader(code: list[tuple[str, int]], at: int) -> str | None:
    text, cycles = code[at]
    zero = _ZERO.match(text)
    if zero is None:
        return None
    first = int(zero[2])
    registers = {f"R{first}"} if zero[1] else {f"R{first}", f"R{first + 1}"}
    for reader, wait in code[at + 1 : at + _FAR]:
        if cycles >= LEAST:
            return None
        if registers & _read(reader):
            return f"{text}, {cycles} cycles before {reader}"
        cycles += wait
    return None


def _read(text: str) -> set[str]:
    name, _, operands = _PREDICATE.sub("", text).partition(" ")
    if not name.startswith(("ST", "RED")):  # the first operand is written
        operands = operands.partition(",")[2]
    return set(re.findall(r"\bR\d+\b", operands))


def early_reads_in(made, folder):
    """Zeros of compiled code that are read too early; None where there is no disassembler."""
    try:
        disassembler()
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI"):  # which installs it
            raise
        return None
    (folder / "kernel.cubin").write_bytes(made.cubin)
    return early_reads(folder / "kernel.cubin")
