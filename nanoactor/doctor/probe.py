"""Program that queries torch and torch_npu about this machine, and prints each answer immediately,
as a line of JSON.

It runs in a separate process, because an import may fail without CANN, and a driver may hang or
crash. TORCH_DEVICE_BACKEND_AUTOLOAD must be 0. The program imports nothing from nanoactor, and no
module imports it.
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


def _print_result(name: str, query: Callable[[], Any]) -> Any:
    """Run a query, print its result under `name`, and return it. If the query raises, print the
    reason under `name` with the suffix "_trouble", and return None."""
    result = None
    try:
        result = query()
        fact = {name: result}
    except Exception as error:  # a library or a driver may raise any exception
        fact = {f"{name}_trouble": _error_text(error)}
    # Start on a new line, whatever a library has printed before.
    os.write(1, f"\n{json.dumps(fact)}\n".encode())
    return result


def _error_text(error: Exception) -> str:
    # The rest of a driver's message is for its developers only.
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _devices(backend: Any) -> list[tuple[str, str]]:
    """Return a description and a state ("ok", "note" or "bad") for each device that `torch.cuda` or
    `torch.npu` sees."""
    devices = []
    for index in range(backend.device_count() if backend.is_available() else 0):
        state, name = "ok", backend.get_device_name(index)
        try:
            free, total = (size / (1 << 30) for size in backend.mem_get_info(index))
            memory = f"{free:.1f} GiB of {total:.1f} GiB free"
            if free < total / 2:
                state, memory = "note", f"{memory}; other processes use most of it"
        except Exception as error:
            state, memory = "bad", _error_text(error)
        devices.append((f"{index} {name}, {memory}", state))
    return devices


def main() -> None:
    """Query torch, the devices and their libraries, and print the results."""
    version = importlib.metadata.version
    _print_result("triton", lambda: version("triton"))
    has_npu = _print_result("torch_npu", lambda: version("torch_npu"))
    _print_result("torch", lambda: str(importlib.import_module("torch").__version__))
    if torch := sys.modules.get("torch"):
        _print_result("cuda_build", lambda: torch.version.cuda)
        _print_result("gpus", lambda: _devices(torch.cuda))
        if has_npu:
            _print_result("npus", lambda: _devices(importlib.import_module("torch_npu").npu))
        if torch_npu := sys.modules.get("torch_npu"):
            _print_result("cann", lambda: str(torch_npu.npu.utils.get_cann_version()))
    _print_result("libascendcl", lambda: str(ctypes.CDLL("libascendcl.so")))
    _print_result("libhccl", lambda: str(ctypes.CDLL("libhccl.so")))
    # Device libraries are known to crash at interpreter shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
