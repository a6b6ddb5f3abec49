"""Choice of the number of threads for a step on the CPU: all available ones, or one if that is
faster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol

_MIN_SAMPLES = {False: 3, True: 1}
"""Number of steps to run with each choice before the choices are compared; by whether steps have
prompts."""
_WEIGHT = 0.3
"""Weight of the latest step in the running mean of its kind."""
_PROBE_STEPS, _PROBE_SOON_STEPS = 64, 4
"""Numbers of steps after which the slower choice is tried again. The second one applies to kinds
whose measurements were copied from another kind."""
_PROBE_RARELY_STEPS = 1024
"""Number of steps after which the slower choice is tried again if it took more than `_MUCH_SLOWER`
times as long."""
_MUCH_SLOWER = 1.5

CORES_VARIABLE = "NANOACTOR_CORES"
"""Environment variable with the number of cores that the process will have, if it starts with
fewer."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, according to its CPU affinity and
    cgroup quota.

    A quota of one and a half cores counts as one: threads that spin while they wait for each other
    would waste the remaining half. `root` is the root of the file system.
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
    """Return the number of cores that the cgroup in `folder` may use; None if it sets no limit."""
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
    """The properties of an `Update` that determine the number of threads."""

    @property
    def rows(self) -> int:
        """Number of tokens that pass through the layers, at least 1."""

    @property
    def prefill(self) -> object | None:
        """The step's prompt chunks; None if all rows decode."""


@dataclasses.dataclass(slots=True)
class _Timings:
    """Measurements of steps of one kind (similar size, with or without prompts): mean seconds per
    token, with one thread and with all threads."""

    means: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    since_probe: int = 0
    is_probe: bool = False
    """True if the current step tries the choice that has been slower so far."""

    @property
    def faster(self) -> int:
        """0 if one thread is faster, 1 if all threads are faster."""
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
        self._timings: dict[tuple[bool, int], _Timings] = {}
        self._chosen = 1

    def choose(self, step: SizedStep) -> int:
        """Return the number of threads with which to run a step."""
        if self._threads == 1:
            return 1
        key = _key(step)
        if key not in self._timings:
            self._timings[key] = self._copy_nearest(*key)
        self._chosen = self._next(self._timings[key], _MIN_SAMPLES[key[0]])
        return self._threads if self._chosen else 1

    def _copy_nearest(self, prefill: bool, size: int) -> _Timings:
        """Return measurements for a new kind of step, copied from the nearest size that has been
        measured, with prompts if `prefill` is True and without otherwise. Measuring each size anew
        would cost at least one slow step."""
        candidates = [
            (abs(other - size), other, timings)
            for (has_prompts, other), timings in self._timings.items()
            if has_prompts == prefill and min(timings.counts) >= _MIN_SAMPLES[prefill]
        ]
        if not candidates:
            return _Timings()
        nearest = min(candidates, key=lambda each: each[:2])[2]
        return _Timings(
            list(nearest.means), list(nearest.counts), _PROBE_RARELY_STEPS - _PROBE_SOON_STEPS
        )

    def _next(self, timings: _Timings, first: int) -> int:
        """Return 0 to run the next step with one thread, or 1 to run it with all threads. At first,
        each choice is tried for `first` steps."""
        if min(timings.counts) < first:
            return int(timings.counts[1] < timings.counts[0])
        timings.since_probe += 1
        slower, faster = max(timings.means), min(timings.means)
        if timings.since_probe >= (
            _PROBE_RARELY_STEPS if slower > _MUCH_SLOWER * faster else _PROBE_STEPS
        ):
            timings.since_probe, timings.is_probe = 0, True
            return 1 - timings.faster
        return timings.faster

    def note(self, step: SizedStep, seconds: float) -> None:
        """Record the duration, in seconds, of the step for which `choose` was called last."""
        if self._threads == 1:
            return
        timings, chosen = self._timings[_key(step)], self._chosen
        seconds_per_token = seconds / step.rows
        timings.counts[chosen] += 1
        if timings.counts[chosen] == 1 or timings.is_probe:  # discard older measurements
            timings.means[chosen], timings.is_probe = seconds_per_token, False
        elif timings.counts[chosen] <= _MIN_SAMPLES[step.prefill is not None]:
            # The first step is slow, because it uses memory and code for the first time.
            timings.means[chosen] = min(timings.means[chosen], seconds_per_token)
        else:
            timings.means[chosen] += _WEIGHT * (seconds_per_token - timings.means[chosen])


def _key(step: SizedStep) -> tuple[bool, int]:
    return step.prefill is not None, step.rows.bit_length()
