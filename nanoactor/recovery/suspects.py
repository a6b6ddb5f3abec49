"""Isolation of requests that may crash a process: suspects are tried separately, by bisection.

A request whose tokens, images or grammar crash a process does so again at the same point when it
resumes. Evidence against a request is a death that its work may have caused: the death of a node
that handled the request, unless the node was killed by a signal that only other processes send. A
request that was present at two such deaths of one kind of node, with no progress in between, is a
suspect. Suspects are readmitted in groups; a death during the trial halves the group. Requests that
were not present, including new ones, run alongside a group. A single suspect runs alone, as only a
death with nothing else running is proof. A group is cleared once all its requests have finished or
passed that point. Finding one culprit among n requests costs two deaths, and one more for each
halving: log2(n).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

MAX_READER_LAG = 32
"""Number of tokens by which readers may lag behind the computation of a sequence on a busy
machine."""
CLEARING_TOKENS = 64
"""Number of emitted tokens that clear a sequence on trial, however soon they arrive."""
_DELIVERY_SECONDS = 2.0
"""Seconds within which computed tokens reach their reader, however slow the machine is."""
TRIAL_SECONDS = 30.0
"""Seconds without a death after which a group is cleared in any case, as its readers may be
slow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The request that crashed processes, and the number of deaths that it explains."""

    request: int
    deaths: int


class Suspects:
    """Finds requests that crash processes. Requests are identified by numbers; times are in
    seconds."""

    def __init__(self) -> None:
        self._last_deaths: dict[str, Mapping[int, int]] = {}
        """By kind of node: the requests that may have caused its last death, with the number of
        tokens that each had emitted."""
        self._kind = ""
        """The kind of node that the requests on trial are suspected to crash."""
        self._groups: list[list[int]] = []
        """Groups to be tried, the next one first."""
        self._accused: Collection[int] = ()
        """Requests that may have caused the death that raised suspicion; they wait until they are
        tried."""
        self._trial: dict[int, int] = {}
        """The group on trial, with the number of tokens that each request had emitted before."""
        self._began = 0.0
        """Time at which the running requests were admitted."""
        self._is_alone = self._is_first = False
        """True if the trial runs alone, and whether the next trial is the first since the last
        death."""
        self._deaths = 0
        """Number of deaths so far that count against the current suspects."""

    @property
    def on_trial(self) -> Collection[int]:
        """Return the requests on trial; empty if there is no trial."""
        return self._trial.keys()

    @property
    def is_alone(self) -> bool:
        """Return True if nothing may run alongside the trial."""
        return bool(self._trial) and self._is_alone

    def note_death(
        self, emitted: Mapping[int, int], accused: Collection[int], kind: str, now: float
    ) -> Verdict | None:
        """Record the death of a node of this kind. `emitted` is the number of tokens emitted by
        each living request. `accused` are the requests that may have caused the death, none if it
        is no evidence. Return a verdict if a request has caused a death while running alone."""
        trial, self._trial, self._is_first = self._trial, {}, True
        seconds = now - self._began
        uncleared = self._not_cleared(trial, emitted, seconds)
        if trial and accused and kind == self._kind:
            group = [request for request in uncleared if request in accused]
            self._deaths += bool(group)
            if group and self._is_alone:
                return self._verdict(group[0])
        else:
            group = (
                self._new_suspects(emitted, accused, kind, seconds)
                if trial or not self._groups
                else []
            )
            if trial and not group:  # an unrelated death proves nothing: try the group again
                self._groups[:0] = [uncleared] if uncleared else []
        self._groups[:0] = _halves(group)
        return None

    def _verdict(self, request: int) -> Verdict:
        deaths, self._deaths = self._deaths, 0
        return Verdict(request, deaths)

    def _new_suspects(
        self, emitted: Mapping[int, int], accused: Collection[int], kind: str, seconds: float
    ) -> list[int]:
        """Return the requests that were also present at the last death of this kind of node and
        have made no progress since; they replace the other suspects."""
        last = self._last_deaths.get(kind, {})
        if accused:
            self._last_deaths[kind] = {request: emitted[request] for request in accused}
        repeated = [request for request in accused if request in last]
        group = [
            request for request in repeated if _was_near(emitted[request] - last[request], seconds)
        ]
        if group:  # these are the only suspects from now on
            self._last_deaths, self._groups, self._kind, self._deaths = {}, [], kind, 2
            self._accused = frozenset(accused)
        return group

    def admit(self, emitted: Mapping[int, int], now: float) -> Collection[int] | None:
        """Start the next trial, if there is one. Return the living requests that may run now; None
        if all may run."""
        is_first, self._is_first, self._trial, self._began = self._is_first, False, {}, now
        while self._groups and not self._trial:
            self._trial = {
                request: emitted[request] for request in self._groups.pop(0) if request in emitted
            }
        self._is_alone = is_first and len(self._trial) == 1
        if not self._trial:
            return None
        if self._is_alone:
            return self.on_trial
        return {
            request for request in emitted if request in self._trial or request not in self._accused
        }

    def is_cleared(self, emitted: Mapping[int, int], now: float) -> bool:
        """Return True if all requests on trial have finished or passed the point of the crash."""
        return not self._not_cleared(self._trial, emitted, now - self._began)

    def _not_cleared(
        self, trial: Mapping[int, int], emitted: Mapping[int, int], seconds: float
    ) -> list[int]:
        """Return the requests of a trial that are alive and not past the point of the crash."""
        return [
            request
            for request in trial
            if request in emitted and _is_near(emitted[request] - trial[request], seconds)
        ]


def _was_near(tokens: int, seconds: float) -> bool:
    """Return True if a request may have been at the same point in two deaths, given the tokens
    emitted and the seconds run in between."""
    return tokens < MAX_READER_LAG and (seconds < _DELIVERY_SECONDS or tokens < 2)


def _is_near(tokens: int, seconds: float) -> bool:
    """Return True if a request on trial is not cleared yet. It must make more progress than
    `_was_near` requires."""
    return tokens < CLEARING_TOKENS and (seconds < 2 * _DELIVERY_SECONDS or tokens < 4)


def _halves(group: list[int]) -> list[list[int]]:
    middle = len(group) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
