"""Bookkeeping for the recovery from deaths of nodes (processes): reports of deaths, a budget of
restarts, and limits on restart times."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from nanoactor.runtime.stall import is_computing, silence_divisor

log = logging.getLogger("nanoactor.system")

DIED = "node %s has died and is being replaced: %s"
"""Format of the log message for each death: node and error."""
_FIRST_DELAY, _MAX_DELAY = 0.1, 5.0
_EXPECTED_BUDGET_FACTOR = 8
"""Factor on the restart budget for deaths that are expected during the search for a request that
kills nodes."""
_START_TIME_FACTOR, _MIN_START_SECONDS = 5.0, 10.0
"""Time limit in seconds for a node's restart: `_START_TIME_FACTOR` times its first start, plus
`_MIN_START_SECONDS` or, if shorter, `stall_timeout`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """The unplanned end of a node's process that was still needed."""

    node: str
    cause: str
    """Cause in one line of text: the signal, the exit status, or an actor's exception."""
    is_evidence: bool
    """True if the node's own work may have caused the death. False if another process killed the
    node or the machine was out of a resource."""

    def __str__(self) -> str:
        """Return the node's name with the cause in parentheses."""
        return f"{self.node} ({self.cause})"


class RestartBudget:
    """Limit on the number of restarts within a time window. The first restart is immediate. The
    second one is delayed by 0.1 seconds, and each later one twice as long as the one before, up to
    5 seconds."""

    def __init__(self, limit: int, window: float) -> None:
        """Allow `limit` restarts within `window` seconds."""
        self._limit, self._window = limit, window
        self._deaths: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Record a death at time `now`, in seconds. Return False, without recording it, if the
        budget is exhausted."""
        while self._deaths and self._deaths[0] <= now - self._window:
            self._deaths.popleft()
        if len(self._deaths) >= self._limit:
            return False
        self._deaths.append(now)
        return True

    def refund(self, limit: int) -> int:
        """Remove up to `limit` of the latest deaths from the budget because their cause is gone.
        Return the number removed."""
        count = min(limit, len(self._deaths))
        for _ in range(count):
            self._deaths.pop()
        return count

    @property
    def spent(self) -> int:
        """Number of deaths that count against the budget. Deaths older than the window are removed
        only when `spend` is called."""
        return len(self._deaths)

    def delay(self) -> float:
        """Return the delay before the next restart, in seconds."""
        if len(self._deaths) < 2:
            return 0.0
        return min(_FIRST_DELAY * 2.0 ** (len(self._deaths) - 2), _MAX_DELAY)


class Deaths:
    """The deaths of a system's nodes (processes): errors of nodes to replace, deaths to report, and
    the remaining restart budget."""

    def __init__(self, limit: int, window: float) -> None:
        """Allow `limit` unexpected deaths, and eight times as many expected ones, within `window`
        seconds."""
        self._budget = RestartBudget(limit, window)
        self._expected = RestartBudget(_EXPECTED_BUDGET_FACTOR * limit, window)
        self.victims: dict[str, BaseException] = {}
        """Errors of the nodes that have died and have not been replaced yet, by node name."""
        self._unreported: list[Death] = []
        self.restarts: Counter[str] = Counter()
        """Number of times that each node was replaced, by node name."""

    def record(self, death: Death, error: BaseException, now: float, *, expected: bool) -> bool:
        """Record a death at time `now`, in seconds. Return False, without recording it, if the
        budget is exhausted.

        `expected` is True if an actor is searching for the request that kills nodes. Such deaths
        have a larger budget of their own.
        """
        if not (self._expected if expected else self._budget).spend(now):
            return False
        self.victims[death.node] = error
        self._unreported.append(death)
        return True

    def report(self, on_cut: Callable[[Sequence[Death]], int]) -> None:
        """Pass all unreported deaths to `on_cut`, which returns how many of the most recent deaths
        no longer have a cause. Remove that many deaths from the restart budgets."""
        deaths, self._unreported = self._unreported, []
        explained = on_cut(deaths)
        self._budget.refund(explained - self._expected.refund(explained))

    def delay(self) -> float:
        """Return the delay before the next restart, in seconds."""
        return self._budget.delay()

    def pop_victims(self) -> dict[str, BaseException]:
        """Return and clear the errors of the nodes that have died, by node name. Log each death and
        count a restart of its node."""
        victims, self.victims = self.victims, {}
        for name, error in victims.items():
            log.warning(DIED + "%s", name, error, details(error))
            self.restarts[name] += 1
        return victims


def details(error: BaseException) -> str:
    """Return the tracebacks from other processes that are attached to an error as notes, for the
    log."""
    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())]
    return "".join(f"\n{note}" for note in notes)


def start_limit(own_start: float, stall_timeout: float | None) -> float:
    """Return the time in seconds within which a node (process) must restart.

    The first start of the node took `own_start` seconds. `StartWatch` counts only a tenth of the
    time in which the node computes.
    """
    minimum = (
        _MIN_START_SECONDS if stall_timeout is None else min(stall_timeout, _MIN_START_SECONDS)
    )
    return minimum + _START_TIME_FACTOR * own_start


class StartWatch:
    """Time limits on the restarts of nodes (processes). While a node uses its CPU, only a tenth of
    the time counts: on a busy machine a healthy node may be slow, whereas a hanging node does not
    compute."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        """`limits` is the time limit of each node in seconds, by node name."""
        self._limits = dict(limits)
        self._waited = dict.fromkeys(limits, 0.0)
        self._cpu: dict[str, float] = {}

    @property
    def interval(self) -> float:
        """Time in seconds between two calls of `tick`."""
        return max(0.05, min(self._limits.values(), default=1.0) / 10)

    def tick(self, passed: float, cpu_seconds: Mapping[str, float]) -> list[str]:
        """Advance time by `passed` seconds and return the nodes that have exceeded their limits,
        each only once. `cpu_seconds` is the total CPU time of each node that is not ready."""
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
