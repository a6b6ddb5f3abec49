"""Compilation of CUDA C++ to machine code with NVRTC, and a cache of the results on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("nanoactor.models.nvrtc")

OPTIONS = (
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    "-default-device",
    "--ptxas-options=-v",
)
MACHINE_SOURCE = Path(__file__).parent / "machine.cuh"
"""Source file of the instruction wrappers that all CUDA C++ kernels use."""


class CompileError(Exception):
    """NVRTC is missing or rejects the source."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCode:
    """Machine code (cubin) of one source, with the assembler's report."""

    cubin: bytes
    report: str
    """The assembler's report on registers and spills; empty if the code was read from disk."""

    def bytes_of(self, kind: str) -> int:
        """Return the largest number of bytes that the report states for any kernel. `kind` is
        "stack frame", "spill stores" or "spill loads". The report must not be empty."""
        return max(map(int, re.findall(rf"(\d+) bytes {kind}", self.report)))

    @property
    def registers(self) -> int:
        """Largest number of registers per thread that the report, which must not be empty, states
        for any kernel."""
        return max(map(int, re.findall(r"Used (\d+) registers", self.report)))


def _nvrtc() -> Any:
    """Import and return the NVRTC bindings, which come with CUDA builds of PyTorch. Raises
    `CompileError` if they cannot be used."""
    try:
        from cuda.bindings import nvrtc

        version = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings may be there without the library
        raise CompileError(f"NVRTC cannot be loaded: {error}") from error
    _check(nvrtc, version)
    return nvrtc


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise CompileError(nvrtc.nvrtcGetErrorString(result[0])[1].decode())
    return result[1] if len(result) == 2 else result[1:]


def _program_log(nvrtc: Any, program: Any) -> str:
    buffer = b" " * _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, buffer))
    return buffer.decode(errors="replace").strip("\0\n ")


def compile_source(source: str, name: str) -> CompiledCode:
    """Return the machine code of `source`. Compiler messages call the source `name`.cu. Raises
    `CompileError` if compiling fails."""
    nvrtc = _nvrtc()
    file = f"{name}.cu".encode()
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), file, 0, [], []))
    options = [option.encode() for option in OPTIONS]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    report = _program_log(nvrtc, program)
    if int(status):
        raise CompileError(report)
    cubin = b" " * _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return CompiledCode(cubin, report)


def cache_folder() -> Path:
    """Return the folder of the machine code cache, which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "nanoactor" / "kernels"


def _version() -> str:
    nvrtc = _nvrtc()
    return str(_check(nvrtc, nvrtc.nvrtcVersion()))


def load_or_compile(source: str, name: str) -> CompiledCode:
    """Return the machine code of `source` from the cache on disk, or compile the source and store
    the result there. Raises `CompileError` if compiling fails."""
    key = hashlib.sha256("\0".join((source, _version(), *OPTIONS)).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    try:
        return CompiledCode(path.read_bytes(), "")
    except OSError:
        pass
    code = compile_source(source, name)
    try:
        _write(path, code.cubin)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be cached, so each start compiles them again: %s", error
        )
    return code


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, because another engine may read it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
