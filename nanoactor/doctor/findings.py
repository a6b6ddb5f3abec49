"""What the facts mean. Nothing is read here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nanoactor.doctor.finding import Finding, bad, note, ok
from nanoactor.doctor.host_findings import cpu, limits, numa, ports
from nanoactor.doctor.machine import Device, Machine
from nanoactor.doctor.npu_findings import npu
from nanoactor.doctor.words import devices, mostly_taken

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_OLDEST_TORCH = (2, 11)


def examine(machine: Machine) -> list[Finding]:
    """Every finding, in the order in which things depend on each other."""
    return [finding for check in _CHECKS for finding in check(machine)]


def python(machine: Machine) -> Iterator[Finding]:
    """The interpreter's version."""
    version = ".".join(str(part) for part in machine.python)
    if _OLDEST_PYTHON <= machine.python[:2] <= _NEWEST_PYTHON:
        yield ok("Python", version)
    else:
        mend = "make a virtual environment of 3.11, 3.12 or 3.13: python3.13 -m venv .venv"
        yield bad("Python", f"{version}; nanoactor needs 3.11 to 3.13", mend)


def torch(machine: Machine) -> Iterator[Finding]:
    """Its version, and whether it could be asked at all."""
    facts = machine.torch
    if facts.version is not None:
        yield _torch_version(facts.version)
    elif not facts.cut_short:
        what = f"cannot be imported: {facts.trouble or 'it says nothing'}"
        yield bad("torch", what, "pip install 'torch>=2.11'")
    if facts.cut_short:
        what = f"the process that asks torch and the drivers: {facts.cut_short}"
        yield bad("probe", f"{what}; what it had not yet said is unknown", _by_hand(machine))


def _by_hand(machine: Machine) -> str:
    npu = ", torch_npu" if machine.torch.npu_version else ""
    command = f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -X faulthandler -c 'import torch{npu}'"
    return f"see where it stops: {command}"


def _torch_version(version: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) >= _OLDEST_TORCH:
        return ok("torch", version)
    return bad("torch", f"{version}; nanoactor needs 2.11 or later", "pip install 'torch>=2.11'")


def gpu(machine: Machine) -> Iterator[Finding]:
    """NVIDIA GPUs, and Triton where there are any."""
    facts = machine.torch
    if not machine.wants_gpu:
        if not machine.wants_npu:
            yield ok("GPU", "there is no NVIDIA GPU; the engine runs on the CPU")
        return
    if not facts.cuda_devices:
        yield _no_gpu(machine)
        return
    yield _gpus(facts.cuda_devices, machine.nvidia_driver)
    if facts.triton is None:
        what = "missing: steps run operator by operator, which costs several times the speed"
        yield note("Triton", what, "pip install triton")
    else:
        yield ok("Triton", facts.triton)


def _gpus(found: tuple[Device, ...], driver: str | None) -> Finding:
    what = devices(found) + (f"; driver {driver}" if driver else "")
    if any(device.trouble for device in found):
        return bad("GPU", what, "nvidia-smi")
    if mostly_taken(found):
        return note("GPU", f"{what}; others use most of its memory", "nvidia-smi")
    return ok("GPU", what)


def _no_gpu(machine: Machine) -> Finding:
    facts = machine.torch
    if facts.version is None or facts.cut_short:
        what = "there is one, but torch could not be asked about it"
        return note("GPU", what, "mend torch first, see above")
    if "CUDA_VISIBLE_DEVICES" in machine.visible:
        value = machine.visible["CUDA_VISIBLE_DEVICES"]
        what = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU, the CPU is taken"
        return note("GPU", what, "unset CUDA_VISIBLE_DEVICES")
    if machine.nvidia_driver is None and not machine.nvidia_nodes:
        what = "one is on the PCI bus, but there is no driver; the CPU is taken"
        mend = "install NVIDIA's driver, or give the container its GPUs: docker run --gpus all"
        return note("GPU", what, mend)
    if facts.cuda_build is None:
        what = f"there is one, but torch {facts.version} was built without CUDA"
        mend = 'install a build for CUDA: PyTorch\'s page "Get started" shows the command'
        return bad("GPU", what, mend)
    driver = machine.nvidia_driver or "unknown"
    why = f": {facts.cuda_trouble}" if facts.cuda_trouble else ""
    what = f"torch (CUDA {facts.cuda_build}) cannot use the GPU (driver {driver}){why}"
    mend = "nvidia-smi must work, and show a CUDA version not older than torch's; update the driver"
    return bad("GPU", what, mend)


def visible(machine: Machine) -> Iterator[Finding]:
    """Variables that hide devices, where they are set."""
    for name, value in machine.visible.items():
        yield ok(name, value or "(empty)")


_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    python,
    torch,
    npu,
    gpu,
    visible,
    ports,
    limits,
    numa,
    cpu,
)
