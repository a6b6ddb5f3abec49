"""Detection of stalled nodes (processes) from ping replies. This is pure logic: time and CPU time
are passed in.

A node is alive while its loop answers pings. Work outside its loop, on a device for example, is
judged by the `Progress` that its actors report.

A false alarm ends a healthy engine, so a node counts as alive when in doubt. Time counts only
while the watchdog itself runs. After a pause of the machine or process group, or while the user's
program blocks the loop, nothing can be concluded about other nodes. A node may be silent ten times
as long while it uses its CPU. The same applies to reported work on the node's own CPU, such as
compiling or tokenizing a book.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from nanoactor.runtime.actor import Progress

_TICKS = 10
"""Number of checks per stall timeout."""
_SILENT_FRACTION = 0.7
"""Fraction of the timeout after which a silent node has stalled. The rest is left for reporting."""
_MAX_PROGRESS_AGE = 2
"""Number of checks after which a node's reported progress is ignored as outdated."""
_COMPUTING_FACTOR = 10.0
"""Factor by which a computing node may be silent for longer."""
_COMPUTING_CPU_SHARE = 0.05
"""Share of one CPU (0 to 1) above which a node counts as computing."""


def is_computing(used: float, passed: float) -> bool:
    """Return True if a process that used `used` seconds of CPU time within `passed` seconds counts
    as computing: more than 5% of one CPU."""
    return used > _COMPUTING_CPU_SHARE * passed


def silence_divisor(computes: bool) -> float:
    """Return the divisor of a node's silent time: 10 while the node computes, else 1."""
    return _COMPUTING_FACTOR if computes else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """A stalled node and what was observed of it, in words."""

    node: str
    symptom: str


@dataclasses.dataclass(slots=True)
class _Work:
    """A piece of work that an actor has reported as its progress."""

    progress: Progress
    seconds: float = 0.0
    """Counted seconds since this piece of work was first reported."""


class StallDetector:
    """Detector of stalled nodes (processes), used while the system has work. The caller pings all
    nodes and calls `tick` at intervals."""

    def __init__(self, nodes: Iterable[str], timeout: float) -> None:
        """`timeout` is the time in seconds after which a node that shows no activity must have been
        reported as stalled."""
        self.interval = timeout / _TICKS
        """Time in seconds between two calls of `tick`."""
        self._limit = _SILENT_FRACTION * timeout
        self._silence = dict.fromkeys(nodes, 0.0)
        self._work: dict[str, dict[str, _Work]] = {}
        self._progress_age: dict[str, int] = {}
        """Number of checks since each node last reported its progress, by node name."""
        self._cpu: dict[str, float] = {}
        self._last_tick: float | None = None

    def reset(self) -> None:
        """Discard all observations, because the system has no work."""
        self._silence = dict.fromkeys(self._silence, 0.0)
        self._work.clear()
        self._cpu.clear()
        self._last_tick = None

    def record_reply(self, node: str, progress: Mapping[str, Progress]) -> None:
        """Record a node's answer to a ping: the progress of its work, by actor name."""
        self._silence[node], self._progress_age[node] = 0.0, 0
        before = self._work.get(node, {})
        self._work[node] = {
            actor: before[actor]
            if actor in before and before[actor].progress[0] == reported[0]
            else _Work(reported)
            for actor, reported in progress.items()
        }

    def tick(self, now: float, cpu_seconds: Mapping[str, float]) -> Stall | None:
        """Advance time to `now`, in seconds, and return a `Stall` if a node has stalled, else None.

        `cpu_seconds` is the CPU time of each node's process, by node name. After a call that
        returns None, the caller must ping every node.
        """
        # More than two intervals mean that this process was paused.
        since = now if self._last_tick is None else self._last_tick
        passed = min(now - since, 2 * self.interval)
        self._last_tick = now
        for node in self._silence:
            used = cpu_seconds.get(node, 0.0) - self._cpu.get(node, cpu_seconds.get(node, 0.0))
            self._silence[node] += passed / silence_divisor(is_computing(used, passed))
            self._progress_age[node] = self._progress_age.get(node, 0) + 1
            if self._progress_age[node] <= _MAX_PROGRESS_AGE:
                for work in self._work.get(node, {}).values():
                    on_own_cpu = len(work.progress) > 2 and work.progress[2]
                    work.seconds += passed / silence_divisor(
                        on_own_cpu and is_computing(used, passed)
                    )
        self._cpu = dict(cpu_seconds)
        return self._verdict()

    def _verdict(self) -> Stall | None:
        node = max(self._silence, key=self._silence.__getitem__, default="")
        if node and self._silence[node] > self._limit:
            return Stall(node, f"it has not answered for {self._silence[node]:.1f} s")
        for name, works in self._work.items():
            for actor, work in works.items():
                if work.seconds > self._limit + work.progress[1]:
                    return Stall(
                        name,
                        f"actor {actor} has worked on the same task for {work.seconds:.1f} s, but "
                        f"at most {work.progress[1]:.1f} s were expected",
                    )
        return None
