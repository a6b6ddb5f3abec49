"""Search, by bisection, for requests that crash processes.

A request whose tokens, images or grammar crash a process does so again at the same point when it
resumes. Evidence against a request is the death of a node (an engine process) that handled the
request, unless the node was killed by a signal that only other processes send. A request is a
*suspect* if it was present at two such deaths of the same kind of node, with no progress in
between.

Suspects run again in groups, one group at a time; each such run is a *trial*. A death during a
group's trial halves the group. Requests that were not present at the deaths, including new ones,
run alongside a group. A single suspect runs alone, because only a death with nothing else running
is proof. A group is cleared once all its requests have finished or have passed the point of the
crash.

Finding one culprit among n requests costs two deaths, plus log2(n) for the halvings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

MAX_READER_LAG = 32
"""Maximum number of tokens by which a reader may lag behind the computation on a busy machine."""
CLEARING_TOKENS = 64
"""Number of emitted tokens after which a request on trial is cleared, however soon they arrive."""
_DELIVERY_SECONDS = 2.0
"""Maximum time, in seconds, until a computed token reaches its reader on a slow machine."""
TRIAL_SECONDS = 30.0
"""Time without a death, in seconds, after which a group is cleared in any case, since its readers
may be slow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The request that was found to crash processes, by number, and the number of deaths attributed
    to it."""

    request: int
    deaths: int


class Suspects:
    """Finds the requests that crash processes. Requests are identified by numbers, and times are in
    seconds."""

    def __init__(self) -> None:
        self._last_deaths: dict[str, Mapping[int, int]] = {}
        """The requests that may have caused the last death of each kind of node, with the number of
        tokens that each had emitted by then."""
        self._kind = ""
        """Kind of node that the requests on trial are suspected of crashing."""
        self._groups: list[list[int]] = []
        """Groups that have yet to be tried, the next one first."""
        self._accused: Collection[int] = ()
        """Requests that may have caused the death that raised suspicion. They wait until their
        group is tried."""
        self._trial: dict[int, int] = {}
        """Requests of the group on trial, with the number of tokens that each had emitted when the
        trial began."""
        self._began = 0.0
        """Time at which the current requests were admitted."""
        self._is_alone = self._is_first = False
        """True if the current trial runs alone, and True if the next trial is the first one since
        the last death."""
        self._deaths = 0
        """Number of deaths so far that are attributed to the current suspects."""

    @property
    def on_trial(self) -> Collection[int]:
        """Requests of the group that is being tried; empty if there is none."""
        return self._trial.keys()

    @property
    def is_alone(self) -> bool:
        """True if no other request may run while the current group is being tried."""
        return bool(self._trial) and self._is_alone

    def note_death(
        self, emitted: Mapping[int, int], accused: Collection[int], kind: str, now: float
    ) -> Verdict | None:
        """Record the death of a node (an engine process) of kind `kind` at time `now`. `emitted`
        maps each live request to its number of emitted tokens. `accused` contains the requests that
        may have caused the death; it is empty if the death is no evidence. Return a verdict if a
        request has caused a death while it ran alone, else None."""
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
        have made no progress since. If there are any, they replace all other suspects."""
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
        """Start the next trial (a run of one group of suspects), if there is one. Return the live
        requests that may run now; None if all of them may. `emitted` maps each live request to its
        number of emitted tokens."""
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
        """Return True if all requests on trial have finished or have passed the point of the
        crash."""
        return not self._not_cleared(self._trial, emitted, now - self._began)

    def _not_cleared(
        self, trial: Mapping[int, int], emitted: Mapping[int, int], seconds: float
    ) -> list[int]:
        """Return the requests of a trial that are live and have not passed the point of the
        crash."""
        return [
            request
            for request in trial
            if request in emitted and _is_near(emitted[request] - trial[request], seconds)
        ]


def _was_near(tokens: int, seconds: float) -> bool:
    """Return True if a request that ran for `seconds` and emitted `tokens` tokens between two
    deaths may have been at the same point both times."""
    return tokens < MAX_READER_LAG and (seconds < _DELIVERY_SECONDS or tokens < 2)


def _is_near(tokens: int, seconds: float) -> bool:
    """Return True if a request on trial may not have passed the point of the crash yet. In the
    trial, it has run for `seconds` and emitted `tokens` tokens. Clearing takes more progress than
    `_was_near` allows."""
    return tokens < CLEARING_TOKENS and (seconds < 2 * _DELIVERY_SECONDS or tokens < 4)


def _halves(group: list[int]) -> list[list[int]]:
    middle = len(group) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
