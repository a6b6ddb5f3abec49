"""Requests that may be what ends a process: suspects are tried apart, in halves.

A request whose tokens, pictures or grammar crash a process does so again when it goes on, at the
same place. Evidence against it is a death that its work may have caused: of a node where it was,
and not by a signal that only others send. A request that was there at two such deaths of one kind
of node, and came no further between them, is a suspect. Suspects are admitted again in groups; a
death meanwhile halves the group. Beside a group run those that were not there, new requests too.
One suspect runs by itself, as only a death with nothing else running proves anything. A group is
cleared once all of it is over or past the place where it was. One among n costs two deaths, and one
more for each halving: log2(n).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

NEXT_TO_NOTHING = 32
"""Tokens of an answer: readers may have been so far behind what was computed, on a busy machine."""
WELL_PAST = 64
"""Tokens that an answer gets on trial."""
_SOON = 2.0
"""Seconds in which what is computed reaches its reader, however slow tokens are."""
TRIAL_SECONDS = 30.0
"""A group that has not killed for so long is cleared too: its readers may be slow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The request that has killed, and how many deaths that explains."""

    request: int
    deaths: int


class Suspects:
    """Looks for what kills. Requests are numbers, moments are seconds."""

    def __init__(self) -> None:
        self._told: dict[str, Mapping[int, int]] = {}
        """By kind of node: the tokens of those who may have caused its last death."""
        self._kind = ""
        """Of the node that those on trial are suspected to kill."""
        self._groups: list[list[int]] = []
        """To be tried, the next one first."""
        self._there: Collection[int] = ()
        """Who may have caused the death that made them suspects; until all are tried, they wait."""
        self._trial: dict[int, int] = {}
        """Of the group on trial: tokens that each had been told before."""
        self._began = 0.0
        """When those who run were admitted."""
        self._is_alone = self._is_first = False
        """Whether nothing runs but the one on trial: it is the first since the last death."""
        self._deaths = 0
        """How many this suspicion has cost."""

    @property
    def on_trial(self) -> Collection[int]:
        """Requests that are tried; empty where there is no trial."""
        return self._trial.keys()

    @property
    def is_alone(self) -> bool:
        """Return True if nothing may run alongside the trial."""
        return bool(self._trial) and self._is_alone

    def note_death(
        self, told: Mapping[int, int], accused: Collection[int], kind: str, now: float
    ) -> Verdict | None:
        """Take note of a death of a kind of node. `told` has the tokens of each living request,
        `accused` those that may have caused it: none where it is no evidence. Return the one that
        has killed alone, if one has."""
        trial, self._trial, self._is_first = self._trial, {}, True
        seconds = now - self._began
        left = self._near(trial, told, seconds)
        if trial and accused and kind == self._kind:
            group = [one for one in left if one in accused]
            self._deaths += bool(group)
            if group and self._is_alone:
                return self._verdict(group[0])
        else:
            group = self._found(told, accused, kind, seconds) if trial or not self._groups else []
            if trial and not group:  # another death, which proves nothing: as if it had not been
                self._groups[:0] = [left] if left else []
        self._groups[:0] = _halves(group)
        return None

    def _verdict(self, request: int) -> Verdict:
        deaths, self._deaths = self._deaths, 0
        return Verdict(request, deaths)

    def _found(
        self, told: Mapping[int, int], accused: Collection[int], kind: str, seconds: float
    ) -> list[int]:
        """Return the requests that were also present at the last death of this kind and have made
        no progress since; they replace the other suspects."""
        last = self._told.get(kind, {})
        if accused:
            self._told[kind] = {one: told[one] for one in accused}
        there = [one for one in accused if one in last]
        group = [one for one in there if _was_near(told[one] - last[one], seconds)]
        if group:  # whatever comes of it, suspicion begins anew
            self._told, self._groups, self._kind, self._deaths = {}, [], kind, 2
            self._there = frozenset(accused)
        return group

    def admit(self, told: Mapping[int, int], now: float) -> Collection[int] | None:
        """Return which of those that live may run now; None: all of them."""
        first, self._is_first, self._trial, self._began = self._is_first, False, {}, now
        while self._groups and not self._trial:
            self._trial = {one: told[one] for one in self._groups.pop(0) if one in told}
        self._is_alone = first and len(self._trial) == 1
        if not self._trial:
            return None
        if self._is_alone:
            return self.on_trial
        return {one for one in told if one in self._trial or one not in self._there}

    def is_cleared(self, told: Mapping[int, int], now: float) -> bool:
        """Return True if all requests on trial have finished or passed the point of the crash."""
        return not self._near(self._trial, told, now - self._began)

    def _near(self, trial: Mapping[int, int], told: Mapping[int, int], seconds: float) -> list[int]:
        """Return those on trial that live, and are not past their place."""
        return [one for one in trial if one in told and _is_near(told[one] - trial[one], seconds)]


def _was_near(tokens: int, seconds: float) -> bool:
    """Return True if a request may have been at the same point in two deaths, given the tokens
    emitted and the time run in between."""
    return tokens < NEXT_TO_NOTHING and (seconds < _SOON or tokens < 2)


def _is_near(tokens: int, seconds: float) -> bool:
    """The same of one on trial, which must come further to be cleared."""
    return tokens < WELL_PAST and (seconds < 2 * _SOON or tokens < 4)


def _halves(group: list[int]) -> list[list[int]]:
    middle = len(group) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
