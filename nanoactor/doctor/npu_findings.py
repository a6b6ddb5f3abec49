"""Ascend: driver, device nodes, CANN, torch_npu and what it sees, from below upwards.

Never run on an NPU: file names, variables and commands are those of Huawei's documents and of
torch_npu's own files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from nanoactor.doctor.finding import Finding, bad, note, ok
from nanoactor.doctor.machine import Ascend, Machine
from nanoactor.doctor.words import devices, mostly_taken

_DRIVER_MOUNTS = (
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
    "-v /usr/local/dcmi:/usr/local/dcmi:ro",
    "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro",
)
_GROUP = "sudo usermod -aG HwHiAiUser $USER"
_INSTALL_DRIVER = "install the NPU's driver and firmware, until `npu-smi info` works"
_INSTALL_CANN = (
    "install CANN (toolkit, and the kernels or ops package of your chip), "
    "then source the set_env.sh it brings"
)
# Of the driver, not of CANN.
_DRIVER_LIBRARIES = ("libascend_hal", "libdrvdsmi", "libdcmi")


def npu(machine: Machine) -> Iterator[Finding]:
    """All of it, or the one line that there is none."""
    if not machine.wants_npu:
        yield _none(machine)
        return
    if not machine.ascend.npus and not machine.ascend.driver:
        what = "its software is here, but no device and no driver"
        yield note("NPU", what, "on a machine without an NPU: pip uninstall torch_npu")
    yield _driver(machine)
    if machine.ascend.firmware is not None:
        yield ok("NPU firmware", machine.ascend.firmware)
    elif not machine.in_container:  # where it is hardly ever mounted
        what = "/usr/local/Ascend/firmware/version.info is missing"
        yield note("NPU firmware", what, "install the firmware that belongs to the driver")
    yield _nodes(machine)
    yield from _smi(machine)
    yield from _cann(machine.ascend, machine.torch.cann)
    yield from _torch_npu(machine)
    yield from _seen(machine)


def _none(machine: Machine) -> Finding:
    if any(device.kind == "NPU" for device in machine.pci):
        what = "one is on the PCI bus, but there is no driver, CANN or torch_npu: it is not used"
        return note("NPU", what, f"{_INSTALL_DRIVER}; {_INSTALL_CANN}; {_mend_pair(None)}")
    return ok("NPU", "there is none: no device, driver, CANN or torch_npu")


def _driver(machine: Machine) -> Finding:
    driver = machine.ascend.driver
    if driver is not None:
        return ok("NPU driver", driver)
    what = "/usr/local/Ascend/driver/version.info is missing"
    if machine.torch.npu_devices:
        return note("NPU driver", what, "nothing, as torch_npu sees the NPU: it lies elsewhere")
    if machine.in_container:
        return bad("NPU driver", what, f"start the container with {_DRIVER_MOUNTS[0]}")
    return bad("NPU driver", what, _INSTALL_DRIVER)


def _nodes(machine: Machine) -> Finding:
    ascend = machine.ascend
    absent = [node.path for node in ascend.managers if not node.present]
    if not ascend.npus:
        absent = ["/dev/davinci0", *absent]
    if absent:
        return bad("device nodes", f"missing: {_list(absent)}", _mend_absent(machine, absent))
    closed = [node.path for node in (*ascend.npus, *ascend.managers) if not node.usable]
    if closed:
        what = f"not readable and writable for this user: {_list(closed)}"
        mend = f"{_GROUP}, then log in again; in a container: the user of its process, with "
        return bad("device nodes", what, f"{mend}--group-add of the host's HwHiAiUser")
    return ok("device nodes", f"{_list(node.path for node in ascend.npus)}, and those beside them")


def _mend_absent(machine: Machine, absent: list[str]) -> str:
    flags = " ".join(f"--device {path}" for path in absent)
    all_flags = f"docker run {flags} {' '.join(_DRIVER_MOUNTS)} ..."
    if not machine.ascend.npus:
        all_flags += " (and --device /dev/davinci1 and so on for more NPUs)"
    if machine.in_container:
        return f"start the container with its devices: {all_flags}"
    return f"{_INSTALL_DRIVER}; in a container: {all_flags}"


def _smi(machine: Machine) -> Iterator[Finding]:
    smi = machine.ascend.smi
    if smi is None:
        mend = "it comes with the driver; in a container: " + " ".join(_DRIVER_MOUNTS[1:])
        yield note("npu-smi", "is not here", mend)
    elif smi.trouble:
        mend = f"see what `npu-smi info` says; {_INSTALL_DRIVER}"
        yield bad("npu-smi", f"`npu-smi info`: {smi.trouble}", mend)
    elif smi.unhealthy:
        what = f"not healthy: {'; '.join(smi.unhealthy)}"
        yield bad("npu-smi", what, "npu-smi info -t health -i 0 names the error of NPU 0")
    elif smi.healthy:
        yield ok("npu-smi", f"{smi.healthy} healthy")
    else:
        yield note("npu-smi", "says nothing of health", "npu-smi info")


def _cann(ascend: Ascend, seen_by_torch: str | None) -> Iterator[Finding]:
    wrong = _wrong_environment(ascend)
    if wrong:
        yield bad("CANN environment", "; ".join(wrong), _mend_cann(ascend))
    else:
        yield ok("CANN environment", f"{ascend.home}")
    version = ascend.cann or seen_by_torch
    if version:
        yield ok("CANN", version)
    elif not wrong:
        what = f"no file below {ascend.home} names its version"
        yield note("CANN", what, "make sure that ASCEND_HOME_PATH is the toolkit's directory")


def _wrong_environment(ascend: Ascend) -> list[str]:
    wrong = []
    if ascend.home is None:
        wrong.append("ASCEND_HOME_PATH is not set")
    if ascend.opp is None:
        wrong.append("ASCEND_OPP_PATH is not set")
    wrong += [f"{path} does not exist" for path in ascend.missing_directories]
    if ascend.missing_libraries:
        wrong.append(f"LD_LIBRARY_PATH leads to no {' and no '.join(ascend.missing_libraries)}")
    return wrong


def _mend_cann(ascend: Ascend) -> str:
    return f"source {shlex.quote(ascend.scripts[0])}" if ascend.scripts else _INSTALL_CANN


def _torch_npu(machine: Machine) -> Iterator[Finding]:
    facts = machine.torch
    if facts.npu_version is None:
        if not facts.cut_short or facts.version is not None:
            yield bad("torch_npu", "is not installed", _mend_pair(facts.version))
        return
    ours, theirs = _release(facts.version), _release(facts.npu_version)
    pair = f"torch_npu {facts.npu_version} with torch {facts.version or '(none)'}"
    if ours is not None and ours != theirs:
        what = f"{pair}: it works with torch {theirs or 'of its own number'} alone"
        yield bad("torch_npu", what, _mend_pair(facts.version))
    elif facts.npu_trouble:
        yield bad("torch_npu", f"{pair}: {facts.npu_trouble}", _mend_import(machine))
    elif ours is not None and not facts.cut_short:
        yield ok("torch_npu", pair)


def _release(version: str | None) -> str | None:
    """2.13.0 of 2.13.0+cpu and of 2.13.0.post1."""
    found = re.match(r"\d+\.\d+\.\d+", version or "")
    return found.group() if found else None


def _mend_pair(torch: str | None) -> str:
    """torch_npu for this torch. Of one that is too old, whatever pip finds goes together."""
    release = _release(torch)
    if release is None or [int(part) for part in release.split(".")] < [2, 11]:
        return "pip install 'nanoactor[npu]'"
    return f"pip install 'nanoactor[npu]' 'torch=={release}' 'torch_npu=={release}.*'"


def _mend_import(machine: Machine) -> str:
    trouble = machine.torch.npu_trouble
    library = re.search(r"lib[\w-]+(?=\.so)", trouble)
    if library and library.group() in _DRIVER_LIBRARIES:
        in_container = f"in a container: {_DRIVER_MOUNTS[0]}"
        return f"{_mend_cann(machine.ascend)}; {in_container}; else {_INSTALL_DRIVER}"
    if library:
        return _mend_cann(machine.ascend)
    if module := re.search(r"No module named '(\w+)", trouble):
        return f"pip install {module.group(1)}"
    return "mend what is bad above, then see: python -c 'import torch, torch_npu'"


def _seen(machine: Machine) -> Iterator[Finding]:
    facts = machine.torch
    if facts.npu_version is None or facts.npu_trouble or facts.version is None:
        return  # said already
    found = facts.npu_devices
    if not found:
        if machine.ascend.npus and not facts.cut_short:
            yield bad("NPU", *_none_seen(machine))
        return
    what = devices(found)
    if any(device.trouble for device in found):
        yield bad("NPU", what, "npu-smi info (is it healthy, and nobody else's?)")
    elif mostly_taken(found):
        yield note("NPU", f"{what}; others use most of its memory", "npu-smi info")
    else:
        yield ok("NPU", what)


def _none_seen(machine: Machine) -> tuple[str, str]:
    what = f"torch_npu sees none, though there is {_list(n.path for n in machine.ascend.npus)}"
    if "ASCEND_RT_VISIBLE_DEVICES" in machine.visible:
        value = machine.visible["ASCEND_RT_VISIBLE_DEVICES"]
        return f"{what}: ASCEND_RT_VISIBLE_DEVICES={value!r}", "unset ASCEND_RT_VISIBLE_DEVICES"
    mend = "npu-smi info must list it; in a container: give it with --device, and to no other"
    return what, mend


def _list(paths: Iterable[str]) -> str:
    return ", ".join(paths)
