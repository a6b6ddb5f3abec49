"""Which of the numbers 0, 1, 2, ... have been seen, in memory bounded by the gaps."""

from __future__ import annotations


class SeenNumbers:
    """A set of numbers that fills up from 0: it stores only those above the first gap."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def add(self, number: int) -> None:
        """Remember a number."""
        self._above.add(number)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def __contains__(self, number: int) -> bool:
        """Whether a number was added."""
        return number < self._below or number in self._above

    def __len__(self) -> int:
        """How many numbers are stored one by one."""
        return len(self._above)
