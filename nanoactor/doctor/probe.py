"""Query torch and torch_npu about this machine; print each answer at once, as a line of JSON.

Run as a separate program, with TORCH_DEVICE_BACKEND_AUTOLOAD=0: an import may fail without CANN,
and a driver may hang or crash. This program imports nothing from nanoactor, and no module imports
it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def _tell(name: str, ask: Callable[[], Any]) -> Any:
    """Print and return the result of `ask`. If it raises, print the reason instead, under the name
    with the suffix "_trouble", and return None."""
    answer = None
    try:
        answer = ask()
        fact = {name: answer}
    except Exception as error:  # of any kind, from a library or a driver
        fact = {f"{name}_trouble": _why(error)}
    # Starts on a new line, whatever a library has printed before.
    os.write(1, f"\n{json.dumps(fact)}\n".encode())
    return answer


def _why(error: Exception) -> str:
    # Only the driver's developers need the rest of its message.
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _devices(backend: Any) -> list[tuple[str, str]]:
    """Return a description and the state of each device that `torch.cuda` or `torch.npu` sees."""
    found = []
    for index in range(backend.device_count() if backend.is_available() else 0):
        state, name = "ok", backend.get_device_name(index)
        try:
            free, total = (size / (1 << 30) for size in backend.mem_get_info(index))
            memory = f"{free:.1f} GiB of {total:.1f} GiB free"
            if free < total / 2:
                state, memory = "note", f"{memory}; other processes use most of it"
        except Exception as error:
            state, memory = "bad", _why(error)
        found.append((f"{index} {name}, {memory}", state))
    return found


def main() -> None:
    """Print what can be detected about torch, the devices and their libraries."""
    version = importlib.metadata.version
    _tell("triton", lambda: version("triton"))
    has_npu = _tell("torch_npu", lambda: version("torch_npu"))
    _tell("torch", lambda: str(importlib.import_module("torch").__version__))
    if torch := sys.modules.get("torch"):
        _tell("cuda_build", lambda: torch.version.cuda)
        _tell("gpus", lambda: _devices(torch.cuda))
        if has_npu:
            _tell("npus", lambda: _devices(importlib.import_module("torch_npu").npu))
        if torch_npu := sys.modules.get("torch_npu"):
            _tell("cann", lambda: str(torch_npu.npu.utils.get_cann_version()))
    _tell("libascendcl", lambda: str(ctypes.CDLL("libascendcl.so")))
    _tell("libhccl", lambda: str(ctypes.CDLL("libhccl.so")))
    # Device libraries are known to crash when the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
