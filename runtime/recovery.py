"""Deaths that are made good: how they are told, and a budget of them; how long a start may take."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from nanoactor.runtime.stall import is_computing, patience

log = logging.getLogger("nanoactor.system")

DIED = "node %s has died and is replaced: %s"
"""The line of the log for each of them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_EXPECTED = 8
"""So many times as many deaths are made good while their cause is looked for."""
_TIMES, _AT_LEAST = 5.0, 10.0
"""A node that starts again may take so many times what its own start took, and so many seconds
more, unless `stall_timeout` is shorter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """The end of a node that was still needed."""

    node: str
    how: str
    """One line for people: the signal, the status, or what an actor raised."""
    is_evidence: bool
    """True if the node's own work may have caused it: no other process killed it, and no resource
    was denied."""

    def __str__(self) -> str:
        """Name the node and the cause."""
        return f"{self.node} ({self.how})"


class RestartBudget:
    """Deaths that are made good: so many within a window of time. Each but the first is followed by
    a pause, twice as long as the one before."""

    def __init__(self, most: int, window: float) -> None:
        """Create a budget of `most` restarts in `window` seconds."""
        self._most, self._window = most, window
        self._deaths: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Note a death at a moment in seconds; False where it is one too many."""
        while self._deaths and self._deaths[0] <= now - self._window:
            self._deaths.popleft()
        if len(self._deaths) >= self._most:
            return False
        self._deaths.append(now)
        return True

    def refund(self, most: int) -> int:
        """Take back the latest deaths, at most so many, as their cause is gone; return how many."""
        found = min(most, len(self._deaths))
        for _ in range(found):
            self._deaths.pop()
        return found

    @property
    def spent(self) -> int:
        """Return the number of deaths in the window, as of the last one."""
        return len(self._deaths)

    def pause(self) -> float:
        """Return the delay before the next start, in seconds."""
        if len(self._deaths) < 2:
            return 0.0
        return min(_FIRST_PAUSE * 2.0 ** (len(self._deaths) - 2), _LONGEST_PAUSE)


class Deaths:
    """The deaths of a system's nodes: those to be made good, those to be told, and what is left of
    the budget."""

    def __init__(self, most: int, window: float) -> None:
        """Create the budgets, see `RestartBudget`."""
        self._budget = RestartBudget(most, window)
        self._expected = RestartBudget(_EXPECTED * most, window)
        self.victims: dict[str, BaseException] = {}
        """Nodes that have died, and are not replaced yet."""
        self._untold: list[Death] = []
        self.restarts: Counter[str] = Counter()
        """By node: how often it was replaced."""

    def note(self, death: Death, error: BaseException, now: float, *, expected: bool) -> bool:
        """Note a death at a moment in seconds, `expected` where its cause is looked for; False
        where it is one too many."""
        if not (self._expected if expected else self._budget).spend(now):
            return False
        self.victims[death.node] = error
        self._untold.append(death)
        return True

    def tell(self, on_cut: Callable[[Sequence[Death]], int]) -> None:
        """Tell of deaths that were not told; those whose cause is gone, as many as are returned,
        count no more."""
        deaths, self._untold = self._untold, []
        explained = on_cut(deaths)
        self._budget.refund(explained - self._expected.refund(explained))

    def pause(self) -> float:
        """Return the delay before the next start, in seconds."""
        return self._budget.pause()

    def take_victims(self) -> dict[str, BaseException]:
        """Return those that have died until now, each of which is told once."""
        victims, self.victims = self.victims, {}
        for name, error in victims.items():
            log.warning(DIED + "%s", name, error, details(error))
            self.restarts[name] += 1
        return victims


def details(error: BaseException) -> str:
    """Return the tracebacks of other processes that an error came with, for the log."""
    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())]
    return "".join(f"\n{note}" for note in notes)


def start_limit(own_start: float, stall_timeout: float | None) -> float:
    """Return the time limit, in seconds, for a node to restart without computing, given that its
    first start took `own_start` seconds."""
    least = _AT_LEAST if stall_timeout is None else min(stall_timeout, _AT_LEAST)
    return least + _TIMES * own_start


class StartWatch:
    """Judges nodes that begin anew. Time in which a node computes counts less, as in
    `StallDetector`: a busy machine is slow, a node that hangs does nothing."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        """`limits`: by node, the seconds that it may take."""
        self._limits = dict(limits)
        self._waited = dict.fromkeys(limits, 0.0)
        self._cpu: dict[str, float] = {}

    @property
    def interval(self) -> float:
        """Return the seconds between two calls of `tick`."""
        return max(0.05, min(self._limits.values(), default=1.0) / 10)

    def tick(self, passed: float, cpu_seconds: Mapping[str, float]) -> list[str]:
        """Advance time by `passed` seconds; `cpu_seconds` are the CPU times so far by node that is
        not ready. Returns the nodes that are late, each once."""
        passed = min(passed, 2 * self.interval)  # a longer time is a pause of our own
        late = []
        for node, used in cpu_seconds.items():
            if node not in self._limits:
                continue
            computes = is_computing(used - self._cpu.get(node, used), passed)
            self._waited[node] += passed / patience(computes)
            if self._waited[node] > self._limits[node]:
                late.append(node)
                del self._limits[node]
        self._cpu = dict(cpu_seconds)
        return late
