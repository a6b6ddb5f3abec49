"""What torch and torch_npu say of this machine, as lines of JSON. Run as a program of its own.

torch loads torch_npu by itself, and fails where CANN is missing; a driver may hang or crash. So it
is done in a child (with TORCH_DEVICE_BACKEND_AUTOLOAD=0), which says each thing as soon as it is
known. It imports nothing of nanoactor, and nothing imports it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def _say(**facts: Any) -> None:
    # Begins a line, whatever a library has printed before.
    sys.stdout.write(f"\n{json.dumps(facts)}\n")
    sys.stdout.flush()


def _why(error: BaseException) -> str:
    # The rest of a driver's message is for its makers.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(backend: Any) -> list[dict[str, Any]]:
    """Of `torch.cuda` or `torch.npu`, which have the same functions."""
    found = []
    for index in range(backend.device_count()):
        device: dict[str, Any] = {"name": str(backend.get_device_name(index))}
        try:
            device["free"], device["total"] = backend.mem_get_info(index)
        except Exception as error:  # the library's or the driver's, of any kind
            device["trouble"] = _why(error)
        found.append(device)
    return found


def _look_at_cuda(torch: Any) -> None:
    _say(cuda_build=torch.version.cuda)
    try:
        _say(cuda_devices=_devices(torch.cuda) if torch.cuda.is_available() else [])
    except Exception as error:
        _say(cuda_trouble=_why(error))


def _look_at_npu() -> None:
    try:
        torch_npu = importlib.import_module("torch_npu")
        _say(npu_devices=_devices(torch_npu.npu))
    except Exception as error:
        _say(npu_trouble=_why(error))
        return
    try:
        _say(cann=str(torch_npu.npu.utils.get_cann_version()))
    except Exception:
        _say(cann=None)


def main() -> None:
    """Say everything that can be found out."""
    npu = _installed("torch_npu")
    _say(triton=_installed("triton"), npu_version=npu)
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        _say(trouble=_why(error))
    else:
        _say(version=str(torch.__version__))
        _look_at_cuda(torch)
        if npu is not None:
            _look_at_npu()
    # Libraries of devices are known to crash when they are taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
