"""Deaths that are made good: how they are told, and a budget of them."""

from __future__ import annotations

from collections import deque

DIED = "node %s has died and is replaced: %s"
"""The line of the log for each of them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class RestartBudget:
    """Deaths that are made good: so many within a window of time. Each but the first is followed by
    a pause, twice as long as the one before."""

    def __init__(self, most: int, window: float) -> None:
        """`window` in seconds."""
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

    @property
    def spent(self) -> int:
        """Return how many deaths the window holds, as of the last one."""
        return len(self._deaths)

    def pause(self) -> float:
        """Return how many seconds to wait before the next start."""
        if len(self._deaths) < 2:
            return 0.0
        return min(_FIRST_PAUSE * 2.0 ** (len(self._deaths) - 2), _LONGEST_PAUSE)
