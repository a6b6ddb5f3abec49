"""All reading of the machine. Files are found below a root, so that a test can bring its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nanoactor.doctor.ascend_facts import look_at_ascend
from nanoactor.doctor.commands import Run, run_command
from nanoactor.doctor.files import children, first_match, text
from nanoactor.doctor.host_facts import look_at_cpu, look_at_limits, look_at_ports
from nanoactor.doctor.machine import Machine, PciDevice
from nanoactor.doctor.torch_facts import look_at_torch

_VISIBLE = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
# Vendor, and the class of an accelerator or a display: a GPU's sound and its switches are neither.
_PCI = {("0x19e5", "0x12"): "NPU", ("0x10de", "0x03"): "GPU"}


def look(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    run: Run = run_command,
) -> Machine:
    """Read everything. What cannot be read is a fact as well: nothing is raised."""
    return Machine(
        python=sys.version_info[:3],
        torch=look_at_torch(environment, run),
        ascend=look_at_ascend(root, environment, run),
        nvidia_driver=_nvidia_driver(root),
        nvidia_nodes=tuple(f"/dev/{name}" for name in children(root / "dev", r"nvidia\d+")),
        visible={name: environment[name] for name in _VISIBLE if name in environment},
        in_container=_in_container(root, environment),
        ports=look_at_ports(environment),
        limits=look_at_limits(root),
        numa_nodes=max(1, len(children(root / "sys/devices/system/node", r"node\d+"))),
        pci=_pci(root),
        cpu=look_at_cpu(root),
    )


def _nvidia_driver(root: Path) -> str | None:
    return first_match(text(root / "proc/driver/nvidia/version"), r"\b(\d+\.\d+(?:\.\d+)?)\b")


def _in_container(root: Path, environment: Mapping[str, str]) -> bool:
    by_file = any((root / name).exists() for name in _CONTAINER_FILES)
    return by_file or any(environment.get(name) for name in _CONTAINER_VARIABLES)


def _pci(root: Path) -> tuple[PciDevice, ...]:
    bus = root / "sys/bus/pci/devices"
    found = []
    for address in children(bus, r".+"):
        device = bus / address
        kind = _PCI.get((text(device / "vendor").strip(), text(device / "class").strip()[:4]))
        if kind is not None:
            found.append(PciDevice(address, kind, _numa(device)))
    return tuple(found)


def _numa(device: Path) -> int | None:
    node = text(device / "numa_node").strip()
    return int(node) if node.isdecimal() else None  # -1: unknown to the firmware
