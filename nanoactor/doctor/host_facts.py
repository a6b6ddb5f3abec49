"""Processors, memory, ports and limits."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from nanoactor.doctor.files import first_match, text
from nanoactor.doctor.machine import SERVER_PORT, Cpu, Limits, Ports

_MIB = 1 << 20
_HCCL_BASE = "60000"
# 16 by older documents of CANN, 32 by newer ones.
HCCL_PORTS = 32
# As models/devices/cpu.py judges.
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


def look_at_ports(environment: Mapping[str, str]) -> Ports:
    """Bind and let go."""
    base = environment.get("HCCL_IF_BASE_PORT", _HCCL_BASE)
    numbers = range(int(base), int(base) + HCCL_PORTS) if base.isdecimal() else range(0)
    return Ports(
        loopback_trouble=_bind("127.0.0.1", 0),
        server_taken=bool(_bind("127.0.0.1", SERVER_PORT)),
        hccl_base=base,
        hccl_taken=tuple(port for port in numbers if port < 1 << 16 and _bind("", port)),
        hccl_range=environment.get("HCCL_HOST_SOCKET_PORT_RANGE"),
    )


def _bind(host: str, port: int) -> str:
    """Why it cannot be done; empty where it can."""
    try:
        with socket.socket() as listener:
            # As servers do: a connection that has just ended does not keep the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def look_at_limits(root: Path) -> Limits:
    """What this process, and its children, may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(
        rings_trouble=_rings_trouble(),
        shm=_size(root / "dev/shm"),
        open_files=_limit(soft),
        most_open_files=_limit(hard),
        locked=_limit(locked),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _rings_trouble() -> str:
    """Make what a ring is made of: anonymous memory, mapped, and an eventfd."""
    descriptors = []
    try:
        descriptors.append(memory := os.memfd_create("nanoactor-doctor"))
        os.ftruncate(memory, _MIB)
        with mmap.mmap(memory, _MIB) as mapped:
            mapped[-1] = 1
        descriptors.append(event := os.eventfd(0, os.EFD_NONBLOCK))
        os.eventfd_write(event, 1)
        os.eventfd_read(event)
    except (OSError, AttributeError) as error:  # refused by a sandbox; or not of this Python
        code = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        return f"{error} {code}".strip()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return ""


def _size(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def look_at_cpu(root: Path) -> Cpu:
    """What the process may use of the host."""
    meminfo = text(root / "proc/meminfo")
    limit = _number(root, "memory.max", "memory/memory.limit_in_bytes")
    used = _number(root, "memory.current", "memory/memory.usage_in_bytes") or 0
    total, available = _kibibytes(meminfo, "MemTotal"), _kibibytes(meminfo, "MemAvailable")
    if limit is not None and total is not None and limit < total:
        total, available = limit, min(available or limit, max(0, limit - used))
    cpuinfo = text(root / "proc/cpuinfo")
    flags = first_match(cpuinfo, r"^(?:flags|Features)\s*:(.*)$") or ""
    return Cpu(
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(root),
        memory=total,
        available=available,
        bfloat16=not _BFLOAT16.isdisjoint(flags.split()),
    )


def _kibibytes(meminfo: str, key: str) -> int | None:
    found = first_match(meminfo, rf"^{key}:\s*(\d+)")
    return int(found) * 1024 if found else None


def _number(root: Path, *names: str) -> int | None:
    """From the first of these control files that has one; "max" is none."""
    for name in names:
        said = text(root / "sys/fs/cgroup" / name).strip()
        if said.isdecimal():
            return int(said)
    return None


def _quota(root: Path) -> float | None:
    words = text(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]) / max(1, int(words[1]))
    quota = _number(root, "cpu/cpu.cfs_quota_us")
    period = _number(root, "cpu/cpu.cfs_period_us")
    return quota / period if quota and period else None
