"""Ports, shared memory, limits, NUMA and processors."""

from __future__ import annotations

from collections.abc import Iterator

from nanoactor.doctor.finding import Finding, bad, note, ok
from nanoactor.doctor.machine import SERVER_PORT, Machine, Ports
from nanoactor.doctor.words import gibibytes, number_ranges

_GIB = 1 << 30
_FEW_FILES, _MANY_FILES = 4096, 65536
_SERVER = f"port {SERVER_PORT}"


def ports(machine: Machine) -> Iterator[Finding]:
    """The loopback interface, the server's port, HCCL's where there is an NPU."""
    found = machine.ports
    if found.loopback_trouble:
        mend = "ip link set lo up (and let this process bind sockets, where a sandbox forbids it)"
        yield bad("loopback", f"127.0.0.1 cannot be bound: {found.loopback_trouble}", mend)
        return
    yield ok("loopback", "127.0.0.1 can be bound")
    if found.server_taken:
        yield note(_SERVER, "taken", f"nanoactor serve MODEL --port {SERVER_PORT + 1}")
    else:
        yield ok(_SERVER, "free")
    if machine.wants_npu:
        yield _hccl(found)


def _hccl(found: Ports) -> Finding:
    if found.hccl_range is not None:
        return ok("HCCL ports", f"HCCL_HOST_SOCKET_PORT_RANGE={found.hccl_range}")
    if not found.hccl_base.isdecimal():
        what = f"HCCL_IF_BASE_PORT={found.hccl_base} is no port"
        return note("HCCL ports", what, "unset HCCL_IF_BASE_PORT")
    if found.hccl_taken:
        what = f"taken: {number_ranges(found.hccl_taken)}; the engine asks for free ones (auto)"
        return note("HCCL ports", what, "for other programs: HCCL_HOST_SOCKET_PORT_RANGE=auto")
    return ok("HCCL ports", f"free from {found.hccl_base}; the engine asks for free ones (auto)")


def limits(machine: Machine) -> Iterator[Finding]:
    """Rings, /dev/shm where HCCL may want it, descriptors, locked memory where a device does."""
    found = machine.limits
    if found.rings_trouble:
        mend = "let this process call memfd_create and eventfd: a seccomp profile may forbid it"
        yield bad("rings", f"no anonymous memory or eventfd: {found.rings_trouble}", mend)
    else:
        yield ok("rings", "memfd and eventfd can be had")
    if machine.wants_npu and found.shm is not None:
        yield _shm(found.shm)
    yield _open_files(found.open_files, found.most_open_files)
    if (machine.wants_npu or machine.wants_gpu) and found.locked is not None:
        what = f"{found.locked // 1024} KiB at most; collectives over RDMA lock the host's buffers"
        mend = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"
        yield note("locked memory", what, mend)


def _shm(size: int) -> Finding:
    what = f"{gibibytes(size)} in /dev/shm"
    if size >= _GIB:
        return ok("shared memory", what)
    mend = "sudo mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)"
    return note("shared memory", f"{what}; HCCL and torch may want more", mend)


def _open_files(soft: int | None, hard: int | None) -> Finding:
    what = "no limit" if soft is None else f"{soft} at most"
    if soft is None or soft >= _FEW_FILES:
        return ok("open files", what)
    if hard is None or hard >= _MANY_FILES:
        return note("open files", what, f"ulimit -n {_MANY_FILES}")
    mend = f"ulimit -n {hard}; more: raise nofile in /etc/security/limits.conf, or docker run "
    return note("open files", what, f"{mend}--ulimit nofile={_MANY_FILES}")


def numa(machine: Machine) -> Iterator[Finding]:
    """Where the accelerators are, if there is more than one place."""
    where = [
        f"{device.kind} {device.address}: "
        + ("?" if device.numa is None else f"node {device.numa}")
        for device in machine.pci
    ]
    what = "; ".join(
        [f"{machine.numa_nodes} nodes" if machine.numa_nodes > 1 else "1 node", *where]
    )
    nodes = {device.numa for device in machine.pci if device.numa is not None}
    if machine.numa_nodes == 1 or not machine.pci:
        yield ok("NUMA", what)
    elif len(nodes) == 1:
        mend = f"numactl --cpunodebind={nodes.pop()} nanoactor serve MODEL"
        yield note("NUMA", f"{what}; runner processes are best near their device", mend)
    else:
        mend = "runner processes are best bound near their device: numactl --cpunodebind=N"
        yield note("NUMA", what, mend)


def cpu(machine: Machine) -> Iterator[Finding]:
    """Cores, memory, bfloat16."""
    found = machine.cpu
    what = f"{found.cores} cores"
    if found.memory is not None:
        what += f", {gibibytes(found.available or 0)} of {gibibytes(found.memory)} free"
    yield ok("CPU", what)
    if found.quota is not None and found.quota < found.cores:
        what = f"the container is given the time of {found.quota:g} of them"
        yield note("CPU quota", what, f"--threads {max(1, int(found.quota))}, or a larger quota")
    if found.bfloat16:
        yield ok("CPU bfloat16", "native")
    else:
        what = "not native: a model on the CPU runs in float32, in twice the memory"
        yield note("CPU bfloat16", what, "nothing; a newer processor has avx512_bf16 or amx_bf16")
