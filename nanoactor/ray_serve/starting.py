"""Start of a replica on cores that others serve from: it uses half of them until it is ready.

Priorities would be simpler, but an unprivileged process cannot raise its own again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nanoactor.runner.timing.threads import CORES_VARIABLE


@contextlib.contextmanager
def half_of_the_cores() -> Iterator[None]:
    """Restrict this process, and those it starts meanwhile, to half of its allowed cores; restore
    all of them at the end. Runners choose their threads by all of them."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    os.environ[CORES_VARIABLE] = str(len(cores))
    _allow([os.getpid()], set(sorted(cores)[: len(cores) // 2]))
    try:
        yield
    finally:
        del os.environ[CORES_VARIABLE]
        own = os.getpid()
        _allow([own], cores)  # first, so that what starts from now on has them all
        _allow(_descendants(own), cores)


def _allow(pids: list[int], cores: set[int]) -> None:
    """Pin all threads of these processes to these cores."""
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
    found: list[int] = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            found += map(int, children)
    return found + [other for child in found for other in _descendants(child)]
