"""Threads of a step on the CPU: as many as the machine has, or one if that is faster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol

_FIRST = {False: 3, True: 1}
"""Number of steps that each choice runs before the choices are compared, by whether the step has
prompts."""
_WEIGHT = 0.3
"""Weight of the latest step in its kind's mean."""
_PROBE, _PROBE_SOON = 64, 4
"""Steps until the other choice is tried again, if it was tried before, and if there is only another
kind of steps to go by, ..."""
_PROBE_FAR = 1024
"""... and if it was more than `_FAR` times as slow."""
_FAR = 1.5

CORES_VARIABLE = "NANOACTOR_CORES"
"""Gives the number of cores that there will be, if a process starts on fewer."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by affinity and cgroup quota.

    A quota of one and a half cores counts as one: threads that spin while waiting for each other
    would waste the rest.
    """
    cores = int(os.environ.get(CORES_VARIABLE, 0)) or len(os.sched_getaffinity(0))
    quotas = [quota for quota in (_quota(folder) for folder in _cgroups(root)) if quota]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup and its ancestors, versions 2 and 1."""
    base, folders = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = base if not controllers else base / controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = top / path.lstrip("/")
        folders += [folder, *(p for p in folder.parents if p == top or top in p.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    """Return the number of cores that a cgroup may use; None if it sets no limit."""
    try:
        words = (folder / "cpu.max").read_text().split()
    except OSError:
        try:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            words = [(folder / name).read_text().strip() for name in names]
        except OSError:
            return None
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit() or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


class SizedStep(Protocol):
    """The part of an `Update` that determines the number of threads."""

    @property
    def rows(self) -> int:
        """Tokens that go through the layers, at least one."""

    @property
    def prefill(self) -> object | None:
        """None if all rows decode."""


@dataclasses.dataclass(slots=True)
class _Kind:
    """Steps of similar size: mean seconds per token, with one thread and with all."""

    means: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    since_probe: int = 0
    is_probe: bool = False
    """True if the current step tries the choice that is usually not taken."""

    @property
    def better(self) -> int:
        """Return 0 if one thread is faster, 1 if all are."""
        return int(self.means[1] < self.means[0])


class ThreadChoice:
    """Chooses between one thread and all of them for each kind of step, by measured step times.

    A second thread costs two wake-ups for each operator. It pays off if products are large and the
    core is really available; on a shared machine, waiting for a core that another process uses can
    make a step take ten times as long. So both are measured, the faster is used, and the other is
    tried again occasionally.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._kinds: dict[tuple[bool, int], _Kind] = {}
        self._chosen = 1

    def choose(self, step: SizedStep) -> int:
        """Return the number of threads for a step."""
        if self._threads == 1:
            return 1
        key = _kind(step)
        if key not in self._kinds:
            self._kinds[key] = self._like_the_nearest(*key)
        self._chosen = self._next(self._kinds[key], _FIRST[key[0]])
        return self._threads if self._chosen else 1

    def _like_the_nearest(self, prefill: bool, size: int) -> _Kind:
        """Return a new kind with the measurements of the nearest known one of its sort: measuring
        again would cost a slow step or more for each size."""
        known = [
            (abs(other - size), other, kind)
            for (sort, other), kind in self._kinds.items()
            if sort == prefill and min(kind.counts) >= _FIRST[prefill]
        ]
        if not known:
            return _Kind()
        nearest = min(known, key=lambda each: each[:2])[2]
        return _Kind(list(nearest.means), list(nearest.counts), _PROBE_FAR - _PROBE_SOON)

    def _next(self, kind: _Kind, first: int) -> int:
        """Return 0 for one thread, 1 for all."""
        if min(kind.counts) < first:
            return int(kind.counts[1] < kind.counts[0])
        kind.since_probe += 1
        slower, faster = max(kind.means), min(kind.means)
        if kind.since_probe >= (_PROBE_FAR if slower > _FAR * faster else _PROBE):
            kind.since_probe, kind.is_probe = 0, True
            return 1 - kind.better
        return kind.better

    def note(self, step: SizedStep, seconds: float) -> None:
        """Record how long the step took for which `choose` was called last."""
        if self._threads == 1:
            return
        kind, chosen = self._kinds[_kind(step)], self._chosen
        each = seconds / step.rows
        kind.counts[chosen] += 1
        if kind.counts[chosen] == 1 or kind.is_probe:  # old measurements do not count
            kind.means[chosen], kind.is_probe = each, False
        elif kind.counts[chosen] <= _FIRST[step.prefill is not None]:
            # The first step touches memory and code for the first time.
            kind.means[chosen] = min(kind.means[chosen], each)
        else:
            kind.means[chosen] += _WEIGHT * (each - kind.means[chosen])


def _kind(step: SizedStep) -> tuple[bool, int]:
    return step.prefill is not None, step.rows.bit_length()
