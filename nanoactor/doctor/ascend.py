"""Checks of Ascend NPUs, from the lowest layer up: driver, device nodes, npu-smi, CANN, torch_npu
and its devices.

They have never run on an NPU. Names and commands are taken from Huawei's documents and the files of
torch_npu.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator

from nanoactor.doctor.checks import judge_devices, release
from nanoactor.doctor.finding import Finding, judge
from nanoactor.doctor.machine import Machine

_DRIVER_FILE = "/usr/local/Ascend/driver/version.info"
_MANAGER_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_UNHEALTHY = re.compile(r"\|\s*(Warning|Alarm|Critical|UNKNOWN)\s*\|", re.IGNORECASE)
_DRIVER_MOUNT = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
_SMI_MOUNTS = " ".join(f"-v {p}:{p}:ro" for p in ("/usr/local/dcmi", "/usr/local/bin/npu-smi"))
_INSTALL_DRIVER = "install the NPU's driver and firmware, and check that `npu-smi info` works"
_INSTALL_CANN = "install CANN (the toolkit, and the ops of your chip), then source its set_env.sh"


def npu(machine: Machine) -> Iterator[Finding]:
    """Run all Ascend checks if an NPU is expected. If not, yield a single finding, which says
    whether an NPU is on the PCI bus."""
    if machine.expects_npu:
        for check in (_driver, _device_nodes, _smi, _cann, _torch_npu, _devices):
            yield from check(machine)
        return
    problem = "an NPU is on the PCI bus, but is not used: there is no driver, CANN or torch_npu"
    fix = f"{_INSTALL_DRIVER}; {_INSTALL_CANN}; {_install_pair(None)}"
    is_on_bus = any(kind == "NPU" for kind, _, _ in machine.pci)
    ok = "there is no NPU: no device, driver, CANN or torch_npu was found"
    yield judge("NPU", not is_on_bus, ok, problem, fix, "note")


def driver_version(machine: Machine) -> str:
    """Return the version of the NPU driver, or an empty string if there is none."""
    return machine.match(r"^version\s*=\s*(.+)$", _DRIVER_FILE)


def _driver(machine: Machine) -> Iterator[Finding]:
    version = driver_version(machine)
    if version or not machine.probe.get("npus"):  # otherwise, it is elsewhere and works
        problem = f"there is no version in {_DRIVER_FILE}"
        fix = f"{_INSTALL_DRIVER}; if this is a container, start it with {_DRIVER_MOUNT}; on a "
        fix += "machine without an NPU: pip uninstall torch_npu"
        yield judge("NPU driver", version, version, problem, fix)


def _device_nodes(machine: Machine) -> Iterator[Finding]:
    npus = machine.files("/dev/davinci[0-9]*") or ["/dev/davinci0"]
    nodes = {node: machine.path(node) for node in (*npus, *_MANAGER_NODES)}
    if absent := [node for node, path in nodes.items() if not os.path.exists(path)]:
        flags = " ".join(f"--device {node}" for node in absent)
        mounts = f"{_DRIVER_MOUNT} {_SMI_MOUNTS} ..."
        fix = f"{_INSTALL_DRIVER}; if this is a container: docker run {flags} {mounts}"
        yield Finding("device nodes", "bad", f"missing: {', '.join(absent)}", fix)
        return
    # Only check permissions: opening a node would already affect the device.
    inaccessible = [node for node, path in nodes.items() if not os.access(path, os.R_OK | os.W_OK)]
    problem = f"this user cannot read and write {', '.join(inaccessible)}"
    fix = (
        "sudo usermod -aG HwHiAiUser $USER, then log in again; if this is a container, start it "
        "with --group-add"
    )
    yield judge("device nodes", not inaccessible, f"{', '.join(nodes)}", problem, fix)


def _smi(machine: Machine) -> Iterator[Finding]:
    names = f"{machine.environment.get('PATH', '')}:/usr/local/bin:/usr/local/sbin".split(":")
    tool = shutil.which("npu-smi", path=":".join(str(machine.path(name)) for name in names))
    if tool is None:
        fix = f"the driver installs npu-smi; if this is a container, start it with {_SMI_MOUNTS}"
        yield Finding("npu-smi", "note", "not found", fix)
        return
    output, trouble = machine.run([tool, "info"], machine.environment, 10.0)
    unhealthy_lines = [
        " ".join(line.strip("| ").split())
        for line in output.splitlines()
        if _UNHEALTHY.search(line)
    ]
    what = f"`npu-smi info`: {trouble or 'not healthy: ' + '; '.join(unhealthy_lines)}"
    fix = f"npu-smi info -t health -i 0 shows the error of NPU 0; {_INSTALL_DRIVER}"
    yield judge(
        "npu-smi",
        not trouble and not unhealthy_lines,
        "it works; all devices are healthy",
        what,
        fix,
    )


def _cann(machine: Machine) -> Iterator[Finding]:
    report, home, problems = machine.probe, machine.environment.get("ASCEND_HOME_PATH", ""), []
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        path = machine.environment.get(name)
        if not path:
            problems.append(f"{name} is not set")
        elif not os.path.isdir(machine.path(path)):
            problems.append(f"{name} is {path}, which does not exist")
    problems += filter(None, (report.get(f"{name}_trouble") for name in ("libascendcl", "libhccl")))
    yield judge("CANN environment", not problems, home, "; ".join(problems), _source_cann(machine))
    if "cann" in report:
        yield Finding("CANN", "ok", report["cann"])


def _source_cann(machine: Machine) -> str:
    scripts = machine.cann_scripts
    return f"source {shlex.quote(scripts[0])}" if scripts else _INSTALL_CANN


def _torch_npu(machine: Machine) -> Iterator[Finding]:
    report, torch = machine.probe, machine.probe.get("torch")
    versions = f"torch_npu {report.get('torch_npu')} with torch {torch}"
    if "torch_npu_trouble" in report:
        yield Finding("torch_npu", "bad", "is not installed", _install_pair(torch))
    elif torch and release(torch) != release(report.get("torch_npu")):
        what = f"{versions}: torch_npu works only with the torch release of the same number"
        yield Finding("torch_npu", "bad", what, _install_pair(torch))
    elif trouble := report.get("npus_trouble"):
        fix = "fix what is bad above, then run: python -c 'import torch, torch_npu'"
        if module := re.search(r"No module named '(\w+)", trouble):
            fix = f"pip install {module[1]}"
        elif ".so" in trouble:
            driver = (
                f"; if this is a container, start it with {_DRIVER_MOUNT}"
                if "libascend_hal" in trouble
                else ""
            )
            fix = f"{_source_cann(machine)}{driver}"
        yield Finding("torch_npu", "bad", f"{versions}: {trouble}", fix)
    elif "npus" in report:
        yield Finding("torch_npu", "ok", versions)


def _install_pair(torch: str | None) -> str:
    """Return the command that installs the torch_npu release for this version of torch. If torch is
    missing or too old, the command installs torch too."""
    if release(torch) < (2, 11):
        return "pip install '.[npu]'"
    version = ".".join(str(part) for part in release(torch))
    return f"pip install '.[npu]' 'torch=={version}' 'torch_npu=={version}.*'"


def _devices(machine: Machine) -> Iterator[Finding]:
    npus = ", ".join(machine.files("/dev/davinci[0-9]*"))
    if devices := machine.probe.get("npus"):
        yield judge_devices("NPU", devices, "npu-smi info", driver_version(machine) or "unknown")
    elif "npus" in machine.probe and npus:
        fix = (
            "npu-smi info must list it; if this is a container, pass --device to no other container"
        )
        if "ASCEND_RT_VISIBLE_DEVICES" in machine.environment:
            fix = "unset ASCEND_RT_VISIBLE_DEVICES"
        yield Finding("NPU", "bad", f"torch_npu sees no NPU, although these exist: {npus}", fix)
