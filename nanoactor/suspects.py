"""Requests that may be what ends a process: who was there at two deaths is tried alone, in halves.

A request whose tokens, pictures or grammar crash a process does so again when it goes on, at the
same place. So a request that lives at two deaths, and was told next to nothing between them, is a
suspect. Suspects are admitted again in groups while everybody else waits; a death meanwhile halves
the group, and who kills alone is convicted. A group is cleared once all of it is over or well past
where it was. One among n costs two deaths, and one more for each halving: log2(n).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

NEXT_TO_NOTHING = 32
"""Tokens of an answer: readers may have been so far behind what was computed, on a busy machine."""
WELL_PAST = 64
"""Tokens that an answer gets on trial."""
TRIAL_SECONDS = 30.0
"""A group that has not killed for so long is cleared too: its readers may be slow."""


class Suspects:
    """Looks for what kills. Requests are numbers."""

    def __init__(self) -> None:
        self._told: Mapping[int, int] = {}
        """Tokens by request, of those who were there at the last death."""
        self._groups: list[list[int]] = []
        """To be tried, the next one first."""
        self._goals: dict[int, int] = {}
        """Of the group on trial: tokens with which each is cleared."""
        self._is_alone = self._is_first = False
        """Whether nobody runs but the group on trial: it is the first since the last death."""

    @property
    def on_trial(self) -> Collection[int]:
        """Requests that alone run; empty where there is no trial."""
        return self._goals.keys()

    def note_death(self, told: Mapping[int, int]) -> int | None:
        """Take note of a death; `told` has the tokens of each request that may have been at work.
        Return the one that has killed alone, if one has."""
        ran = [one for one in self._goals if one in told]
        group = [one for one in ran if told[one] < self._goals[one]]
        self._goals, self._is_first = {}, True
        if group and ran == group[:1] and self._is_alone:
            return group[0]
        if not group and not self._groups:
            last, self._told = self._told, dict(told)
            group = [one for one in told if one in last and told[one] - last[one] < NEXT_TO_NOTHING]
        if group:
            self._told = {}  # whatever comes of it, suspicion begins anew
        self._groups[:0] = _halves(group)
        return None

    def admit(self, told: Mapping[int, int]) -> Collection[int] | None:
        """Return who of those that live may run now; None: everybody."""
        self._goals, self._is_alone, self._is_first = {}, self._is_first, False
        while self._groups and not self._goals:
            group = self._groups.pop(0)
            self._goals = {one: told[one] + WELL_PAST for one in group if one in told}
        return self.on_trial if self._goals else None

    def is_cleared(self, told: Mapping[int, int]) -> bool:
        """Tell whether the group on trial is over or well past its place."""
        return all(told.get(one, goal) >= goal for one, goal in self._goals.items())


def _halves(group: list[int]) -> list[list[int]]:
    middle = len(group) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
