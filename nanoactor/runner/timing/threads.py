"""The number of threads for a step on the CPU: all available ones, or one if that is faster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol

_FIRST = {False: 3, True: 1}
"""Number of steps to run with each choice before the choices are compared, by whether the steps
have prompts."""
_WEIGHT = 0.3
"""Weight of the latest step in the running mean of its kind."""
_PROBE, _PROBE_SOON = 64, 4
"""Numbers of steps until the slower choice is tried again; the second one is for a kind whose
measurements are copied from another kind."""
_PROBE_FAR = 1024
"""Number of steps until the slower choice is tried again if it took more than `_FAR` times as
long."""
_FAR = 1.5

CORES_VARIABLE = "NANOACTOR_CORES"
"""Environment variable with the number of cores that the process will have, if it starts on
fewer."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by affinity and cgroup quota.

    A quota of one and a half cores counts as one: threads that spin while they wait for each other
    would waste the remaining half.
    """
    cores = int(os.environ.get(CORES_VARIABLE, 0)) or len(os.sched_getaffinity(0))
    quotas = [quota for quota in (_quota(folder) for folder in _cgroups(root)) if quota]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup and its ancestors, for cgroup versions 1 and
    2."""
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
        """Return the number of tokens that go through the layers, at least 1."""

    @property
    def prefill(self) -> object | None:
        """Return the step's prompt chunks; None if all rows decode."""


@dataclasses.dataclass(slots=True)
class _Kind:
    """Measurements of steps of similar size: mean seconds per token, with one thread and with all
    threads."""

    means: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    since_probe: int = 0
    is_probe: bool = False
    """Whether the current step tries the choice that was slower so far."""

    @property
    def better(self) -> int:
        """Return 0 if running with one thread is faster, 1 if running with all threads is."""
        return int(self.means[1] < self.means[0])


class ThreadChoice:
    """Chooses between one thread and all threads for each kind of step, by measured step times.

    A second thread costs two wake-ups for each operator. It pays off if matrix products are large
    and the core is really available. On a shared machine, waiting for a core that another process
    uses can make a step take ten times as long. Both choices are therefore measured, the faster one
    is used, and the other one is tried again occasionally.
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
        """Return a new kind with the measurements of the nearest size, among measured kinds that
        also have, or also lack, prompts. Measuring each size anew would cost at least one slow
        step."""
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
        """Return 0 for one thread, 1 for all threads."""
        if min(kind.counts) < first:
            return int(kind.counts[1] < kind.counts[0])
        kind.since_probe += 1
        slower, faster = max(kind.means), min(kind.means)
        if kind.since_probe >= (_PROBE_FAR if slower > _FAR * faster else _PROBE):
            kind.since_probe, kind.is_probe = 0, True
            return 1 - kind.better
        return kind.better

    def note(self, step: SizedStep, seconds: float) -> None:
        """Record the duration of the step for which `choose` was called last."""
        if self._threads == 1:
            return
        kind, chosen = self._kinds[_kind(step)], self._chosen
        each = seconds / step.rows
        kind.counts[chosen] += 1
        if kind.counts[chosen] == 1 or kind.is_probe:  # discard older measurements
            kind.means[chosen], kind.is_probe = each, False
        elif kind.counts[chosen] <= _FIRST[step.prefill is not None]:
            # The first step is slow, as it touches memory and code for the first time.
            kind.means[chosen] = min(kind.means[chosen], each)
        else:
            kind.means[chosen] += _WEIGHT * (each - kind.means[chosen])


def _kind(step: SizedStep) -> tuple[bool, int]:
    return step.prefill is not None, step.rows.bit_length()
