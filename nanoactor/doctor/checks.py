"""Checks of Python, torch, GPUs and the host: ports, what rings (shared-memory message queues)
require, limits, NUMA and CPU."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator

from nanoactor.doctor.finding import Finding, judge
from nanoactor.doctor.machine import Machine

_GIB = 1 << 30
_CGROUP = "/sys/fs/cgroup"


def python(machine: Machine) -> Iterator[Finding]:
    """Check the version of Python."""
    version = ".".join(str(part) for part in machine.python)
    problem = f"{version}, but nanoactor needs 3.11 to 3.13"
    fix = "create a virtual environment with Python 3.11 to 3.13: python3.13 -m venv .venv"
    yield judge("Python", (3, 11) <= machine.python[:2] <= (3, 13), version, problem, fix)


def torch(machine: Machine) -> Iterator[Finding]:
    """Check the version of torch, and report errors of the probe that queries it."""
    report, fix = machine.probe, "pip install 'torch>=2.11'"
    version, trouble = report.get("torch"), report["cut_short"]
    if version:
        problem = f"{version}, but nanoactor needs 2.11 or later"
        yield judge("torch", release(version) >= (2, 11), version, problem, fix)
    elif not trouble:
        why = report.get("torch_trouble", "no error was reported")
        yield Finding("torch", "bad", f"cannot be imported: {why}", fix)
    if trouble:
        what = f"the process that queries torch and the drivers failed: {trouble}"
        names = "torch, torch_npu" if report.get("torch_npu") else "torch"
        command = f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -X faulthandler -c 'import {names}'"
        fix = f"to see where it stops, run: {command}"
        yield Finding("probe", "bad", f"{what}; what it had not yet reported is unknown", fix)


def release(version: str | None) -> tuple[int, ...]:
    """Return the release number of a version: (2, 13, 0) for "2.13.0+cpu" and "2.13.0.post1", ()
    for None."""
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])


def gpu(machine: Machine) -> Iterator[Finding]:
    """Check NVIDIA GPUs, and Triton if there are any."""
    driver = machine.match(r"\b(\d+\.\d+[\d.]*)\b", "/proc/driver/nvidia/version") or "unknown"
    if devices := machine.probe.get("gpus"):
        yield judge_devices("GPU", devices, "nvidia-smi", driver)
        triton = machine.probe.get("triton", "")
        problem = "not installed: steps run operator by operator, which is several times slower"
        yield judge("Triton", triton, triton, problem, "pip install triton", "note")
    elif machine.has_gpu:
        yield _unusable_gpu(machine, driver)
    elif not machine.expects_npu:
        yield Finding("GPU", "ok", "there is no NVIDIA GPU; the engine runs on the CPU")


def judge_devices(name: str, devices: list[tuple[str, str]], tool: str, driver: str) -> Finding:
    """Return a finding about the devices that torch sees. `devices` contains each device's
    description and state from the probe. `tool` is the command that shows details."""
    states = {state for _, state in devices}
    what = f"{len(devices)}: {'; '.join(line for line, _ in devices)}; driver {driver}"
    fix = f"check with {tool} that each device is healthy and that nobody else uses it"
    return judge(name, states == {"ok"}, what, what, fix, "bad" if "bad" in states else "note")


def _unusable_gpu(machine: Machine, driver: str) -> Finding:
    report, hidden = machine.probe, machine.environment.get("CUDA_VISIBLE_DEVICES")
    if report["cut_short"] or "torch" not in report:
        what = "there is a GPU, but torch could not be queried about it"
        return Finding("GPU", "note", what, "fix torch first, see above")
    if hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU, so the CPU is used"
        return Finding("GPU", "note", what, "unset CUDA_VISIBLE_DEVICES")
    if driver == "unknown" and not machine.files("/dev/nvidia[0-9]*"):
        what = "a GPU is on the PCI bus, but there is no driver, so the CPU is used"
        fix = "install NVIDIA's driver, or give the container its GPUs: docker run --gpus all"
        return Finding("GPU", "note", what, fix)
    if report.get("cuda_build") is None:
        what = f"there is a GPU, but torch {report['torch']} was built without CUDA"
        fix = 'install a CUDA build of torch: PyTorch\'s page "Get started" shows the command'
        return Finding("GPU", "bad", what, fix)
    why = f"driver {driver}; {report.get('gpus_trouble', 'torch sees no GPU')}"
    what = f"torch (CUDA {report['cuda_build']}) cannot use the GPU: {why}"
    fix = "update the driver: nvidia-smi must work and show a CUDA version not older than torch's"
    return Finding("GPU", "bad", what, fix)


def visible_devices(machine: Machine) -> Iterator[Finding]:
    """Report environment variables that hide devices, if any are set."""
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if name in machine.environment:
            yield Finding(name, "ok", machine.environment[name] or "(empty)")


def network(_machine: Machine) -> Iterator[Finding]:
    """Check that sockets can be bound on the loopback interface, both on a free port and on the
    server's default port, 8000."""
    loopback_fix = "ip link set lo up (if a sandbox forbids binding sockets, allow it)"
    port_fix = "nanoactor serve MODEL --port 8001"
    for name, port, fix in (("loopback", 0, loopback_fix), ("port 8000", 8000, port_fix)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            yield Finding(name, "note" if port else "bad", f"cannot be bound: {error}", fix)
            return
        yield Finding(name, "ok", "can be bound")


def rings(_machine: Machine) -> Iterator[Finding]:
    """Check that this process can create what a ring (a shared-memory message queue) needs:
    anonymous memory, a mapping and an eventfd."""
    trouble = ""
    try:
        with os.fdopen(os.memfd_create("nanoactor-doctor"), "r+b") as memory:
            memory.truncate(1 << 20)
            mmap.mmap(memory.fileno(), 1 << 20).close()
        os.close(os.eventfd(0))
    except (OSError, AttributeError) as error:  # forbidden by a sandbox, or missing in this Python
        trouble = f"memfd or eventfd is not available: {error}"
    fix = "allow this process to call memfd_create and eventfd; a seccomp profile may forbid them"
    yield judge("rings", not trouble, "memfd and eventfd are available", trouble, fix)


def limits(machine: Machine) -> Iterator[Finding]:
    """Check the limit on open files, and, if an NPU is expected, the size of /dev/shm for HCCL."""
    if machine.expects_npu:
        with contextlib.suppress(OSError):
            size = shutil.disk_usage(machine.path("/dev/shm")).total  # noqa: S108
            what, fix = f"{size / _GIB:.1f} GiB in /dev/shm", "in a container: --shm-size=8g; else "
            problem, fix = (
                f"{what}, but HCCL may need more",
                f"{fix}mount -o remount,size=8G /dev/shm",
            )
            yield judge("shared memory", size >= _GIB, what, problem, fix, "note")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    fix = "ulimit -n 65536; if that is refused, raise nofile in /etc/security/limits.conf, or use "
    fix += "docker run --ulimit nofile=65536"
    yield judge("open files", soft >= 4096 or what == "no limit", what, what, fix, "note")


def numa(machine: Machine) -> Iterator[Finding]:
    """Report the NUMA node of each accelerator. With several nodes, suggest how to keep processes
    near their accelerators."""
    count = len(machine.files("/sys/devices/system/node/node[0-9]*")) or 1
    accelerators = [f"{kind} {address}: node {node}" for kind, address, node in machine.pci]
    what = "; ".join([f"{count} node{'s' * (count > 1)}", *accelerators])
    nodes = {node for _, _, node in machine.pci} - {"?"}
    node = nodes.pop() if len(nodes) == 1 else "N"
    fix = f"keep runner processes near their device: numactl --cpunodebind={node} nanoactor serve"
    yield judge("NUMA", count == 1 or not accelerators, what, what, fix, "note")


def cpu(machine: Machine) -> Iterator[Finding]:
    """Check cores, memory and bfloat16 support. In a container, also check its CPU quota."""
    cores, cpu_max, cpu_v1 = (
        len(os.sched_getaffinity(0)),
        f"{_CGROUP}/cpu.max",
        f"{_CGROUP}/cpu/cpu.cfs",
    )
    yield Finding("CPU", "ok", f"{cores} cores, {_memory(machine)}")
    quota_us = _number(machine, r"^(\d+)", cpu_max, f"{cpu_v1}_quota_us")
    quota = quota_us / (_number(machine, r"(\d+)$", cpu_max, f"{cpu_v1}_period_us") or 1)
    if 0 < quota < cores:
        what = f"the container may use the CPU time of {quota:g} cores"
        fix = f"--threads {max(1, int(quota))}, or a larger quota"
        yield Finding("CPU quota", "note", what, fix)
    flags = machine.match(r"^(?:flags|Features)\s*:(.*)$", "/proc/cpuinfo").split()
    is_native = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(
        flags
    )  # same test as models/devices/cpu/device.py
    problem = "not native: a model on the CPU runs in float32 and takes twice the memory"
    fix = "none on this processor; newer processors have avx512_bf16 or amx_bf16"
    yield judge("CPU bfloat16", is_native, "native", problem, fix, "note")


def _memory(machine: Machine) -> str:
    total = 1024 * _number(machine, r"^MemTotal:\s*(\d+)", "/proc/meminfo")
    free = 1024 * _number(machine, r"^MemAvailable:\s*(\d+)", "/proc/meminfo")
    v1 = f"{_CGROUP}/memory/memory"
    limit = _number(machine, r"^(\d+)", f"{_CGROUP}/memory.max", f"{v1}.limit_in_bytes")
    used = _number(machine, r"^(\d+)", f"{_CGROUP}/memory.current", f"{v1}.usage_in_bytes")
    if 0 < limit < total:
        total, free = limit, min(free or limit, max(0, limit - used))
    return f"{free / _GIB:.1f} GiB of {total / _GIB:.1f} GiB free" if total else "memory unknown"


def _number(machine: Machine, pattern: str, *paths: str) -> int:
    return int(machine.match(pattern, *paths) or 0)
