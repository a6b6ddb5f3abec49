"""Startup of a replica while others are serving on the same machine: until it is ready, it is
restricted to half of the cores.

A lower priority would be simpler, but an unprivileged process cannot raise its priority again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nanoactor.runner.timing.threads import CORES_VARIABLE


@contextlib.contextmanager
def restricted_to_half_of_cores() -> Iterator[None]:
    """Restrict this process, and the processes it starts, to half of the allowed cores in this
    context. Afterwards, all cores are allowed again. The engine still chooses its number of threads
    for all cores. With a single core, nothing changes."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    os.environ[CORES_VARIABLE] = str(len(cores))
    _set_affinity([os.getpid()], set(sorted(cores)[: len(cores) // 2]))
    try:
        yield
    finally:
        del os.environ[CORES_VARIABLE]
        own = os.getpid()
        _set_affinity([own], cores)  # first, so that new processes may use all cores
        _set_affinity(_descendants(own), cores)


def _set_affinity(pids: list[int], cores: set[int]) -> None:
    """Allow all threads of these processes to run only on these cores."""
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setaffinity(task, cores)


def _tasks(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    children_of_tasks: list[int] = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            children_of_tasks += map(int, children)
    return children_of_tasks + [
        other for child in children_of_tasks for other in _descendants(child)
    ]
