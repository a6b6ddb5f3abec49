"""Recovery from node deaths: reports of deaths, a budget of restarts, and limits on start times."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from nanoactor.runtime.stall import is_computing, silence_divisor

log = logging.getLogger("nanoactor.system")

DIED = "node %s has died and is being replaced: %s"
"""Log message for each death."""
_FIRST_DELAY, _MAX_DELAY = 0.1, 5.0
_EXPECTED_BUDGET_FACTOR = 8
"""Factor on the restart budget while the cause of the deaths is being searched for."""
_START_TIME_FACTOR, _MIN_START_SECONDS = 5.0, 10.0
"""Time limit for a node's restart: `_START_TIME_FACTOR` times its own start time, plus
`_MIN_START_SECONDS` or, if shorter, `stall_timeout`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """The end of a node that was still needed."""

    node: str
    cause: str
    """One line for humans: the signal, the exit status, or an actor's exception."""
    is_evidence: bool
    """True if the node's own work may have caused the death: no other process killed the node, and
    it was denied no resource."""

    def __str__(self) -> str:
        """Return the node's name and the cause of death."""
        return f"{self.node} ({self.cause})"


class RestartBudget:
    """Budget of restarts within a time window. The first restart is not delayed; each later one is
    delayed twice as long as the one before, up to a limit."""

    def __init__(self, limit: int, window: float) -> None:
        """Create a budget of `limit` restarts in `window` seconds."""
        self._limit, self._window = limit, window
        self._deaths: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Record a death at `now`, in seconds; return False if it exceeds the budget."""
        while self._deaths and self._deaths[0] <= now - self._window:
            self._deaths.popleft()
        if len(self._deaths) >= self._limit:
            return False
        self._deaths.append(now)
        return True

    def refund(self, limit: int) -> int:
        """Remove up to `limit` of the latest deaths from the budget, as their cause is gone; return
        the number removed."""
        count = min(limit, len(self._deaths))
        for _ in range(count):
            self._deaths.pop()
        return count

    @property
    def spent(self) -> int:
        """Return the number of deaths in the window that ended with the latest death."""
        return len(self._deaths)

    def delay(self) -> float:
        """Return the delay before the next start, in seconds."""
        if len(self._deaths) < 2:
            return 0.0
        return min(_FIRST_DELAY * 2.0 ** (len(self._deaths) - 2), _MAX_DELAY)


class Deaths:
    """The deaths of a system's nodes: those to recover from, those to report, and the remaining
    budget."""

    def __init__(self, limit: int, window: float) -> None:
        """Create the budgets; see `RestartBudget`."""
        self._budget = RestartBudget(limit, window)
        self._expected = RestartBudget(_EXPECTED_BUDGET_FACTOR * limit, window)
        self.victims: dict[str, BaseException] = {}
        """Errors of the nodes that have died and are not replaced yet, by node."""
        self._unreported: list[Death] = []
        self.restarts: Counter[str] = Counter()
        """Number of times that each node was replaced."""

    def record(self, death: Death, error: BaseException, now: float, *, expected: bool) -> bool:
        """Record a death at `now`, in seconds; return False if it exceeds the budget. `expected` is
        True if the cause of the deaths is being searched for."""
        if not (self._expected if expected else self._budget).spend(now):
            return False
        self.victims[death.node] = error
        self._unreported.append(death)
        return True

    def report(self, on_cut: Callable[[Sequence[Death]], int]) -> None:
        """Report the deaths that were not reported yet to `on_cut`, and refund as many as it
        returns, as their cause is gone."""
        deaths, self._unreported = self._unreported, []
        explained = on_cut(deaths)
        self._budget.refund(explained - self._expected.refund(explained))

    def delay(self) -> float:
        """Return the delay before the next start, in seconds."""
        return self._budget.delay()

    def pop_victims(self) -> dict[str, BaseException]:
        """Return the errors of the nodes that have died so far, by node; log each death and count a
        restart for it."""
        victims, self.victims = self.victims, {}
        for name, error in victims.items():
            log.warning(DIED + "%s", name, error, details(error))
            self.restarts[name] += 1
        return victims


def details(error: BaseException) -> str:
    """Return the tracebacks from other processes that are attached to an error, for the log."""
    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())]
    return "".join(f"\n{note}" for note in notes)


def start_limit(own_start: float, stall_timeout: float | None) -> float:
    """Return the time limit, in seconds, for a node to restart without computing, given that its
    first start took `own_start` seconds."""
    minimum = (
        _MIN_START_SECONDS if stall_timeout is None else min(stall_timeout, _MIN_START_SECONDS)
    )
    return minimum + _START_TIME_FACTOR * own_start


class StartWatch:
    """Limits the time that nodes may take to restart. Time in which a node computes counts less, as
    in `StallDetector`: on a busy machine a node is slow, but a node that hangs does not compute."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        """`limits` holds the time limit of each node in seconds."""
        self._limits = dict(limits)
        self._waited = dict.fromkeys(limits, 0.0)
        self._cpu: dict[str, float] = {}

    @property
    def interval(self) -> float:
        """Return the number of seconds between calls to `tick`."""
        return max(0.05, min(self._limits.values(), default=1.0) / 10)

    def tick(self, passed: float, cpu_seconds: Mapping[str, float]) -> list[str]:
        """Advance time by `passed` seconds. `cpu_seconds` holds the total CPU time of each node
        that is not ready. Returns the nodes that have exceeded their limit, each only once."""
        passed = min(passed, 2 * self.interval)  # a longer time means that we were paused
        late = []
        for node, cpu in cpu_seconds.items():
            if node not in self._limits:
                continue
            is_busy = is_computing(cpu - self._cpu.get(node, cpu), passed)
            self._waited[node] += passed / silence_divisor(is_busy)
            if self._waited[node] > self._limits[node]:
                late.append(node)
                del self._limits[node]
        self._cpu = dict(cpu_seconds)
        return late
