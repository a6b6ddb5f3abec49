"""Choice of the requests that run again after the death of a process. Requests that may have caused
the death are tried separately."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from nanoactor.recovery.journal import Entry
from nanoactor.recovery.suspects import Suspects
from nanoactor.runtime.recovery import Death

log = logging.getLogger("nanoactor.engine")

# Kinds of node that also process requests that are still waiting.
_QUEUE_NODES = ("tokenizer", "vision")


class Readmission:
    """Decides which requests resume after deaths of processes: all at once, unless some of them may
    have caused the deaths. Those run separately, in *trials* (see `Suspects` for the method)."""

    def __init__(self, max_running: int) -> None:
        """`max_running` is the maximum number of requests that the engine runs at once. These are
        the first ones by priority and arrival."""
        self._max_running = max_running
        self._suspects = Suspects()
        self.trials = 0
        """Number of trials (separate runs of requests that may have caused deaths) since the engine
        started."""
        self._deferred: dict[int, Entry] = {}
        """Requests that wait for the end of a trial, by their first uid."""

    @property
    def is_trial(self) -> bool:
        """True if requests that may have caused a death are being tried now."""
        return bool(self._suspects.on_trial)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the end of a trial."""
        return len(self._deferred)

    def note_deaths(
        self,
        deaths: Sequence[Death],
        entries: Iterable[Entry],
        may_run_on: Callable[[Entry, str], bool],
        now: float,
    ) -> tuple[Entry, Death, int] | None:
        """Record deaths of processes at time `now` (seconds). `may_run_on(entry, node)` returns
        True if a request may have been running on a node. If it is now known which request caused a
        death, return the request, the death, and the number of deaths attributed to the request;
        else None."""
        live = [
            entry for entry in entries if not entry.is_over and _uid(entry) not in self._deferred
        ]
        live.sort(key=lambda entry: (entry.submit.spec.priority, _uid(entry)))
        self._deferred = {}
        # Of several simultaneous deaths only one is examined, as the others may be its
        # consequences.
        death = next((death for death in deaths if death.is_evidence), None) or deaths[0]
        kind = death.node.partition(".")[0]
        running = live if kind in _QUEUE_NODES else live[: self._max_running]
        accused = [
            _uid(entry) for entry in running if death.is_evidence and may_run_on(entry, death.node)
        ]
        by_uid = {_uid(entry): entry for entry in live}
        emitted = {uid: _emitted_tokens(entry) for uid, entry in by_uid.items()}
        verdict = self._suspects.note_death(emitted, accused, kind, now)
        return None if verdict is None else (by_uid[verdict.request], death, verdict.deaths)

    def admit(self, entries: Iterable[Entry], now: float) -> Sequence[Entry]:
        """Return the requests that resume now. The others wait for the end of a trial."""
        live = {_uid(entry): entry for entry in entries if not entry.is_over}
        emitted = {uid: _emitted_tokens(entry) for uid, entry in live.items()}
        chosen = self._suspects.admit(emitted, now)
        if chosen is None:
            return list(live.values())
        self.trials += 1
        log.warning(
            "%d requests may have caused the death of a process and are retried %s",
            len(self._suspects.on_trial),
            "with no other request running"
            if self._suspects.is_alone
            else "separately from other suspects",
        )
        self._deferred = {uid: entry for uid, entry in live.items() if uid not in chosen}
        return [entry for uid, entry in live.items() if uid in chosen]

    def admit_next(self, now: float) -> Sequence[Entry]:
        """Return the requests to admit after a trial has ended: all that were waiting, or those of
        the next trial."""
        deferred, self._deferred = self._deferred, {}
        return self.admit(deferred.values(), now)

    def defer(self, entry: Entry) -> bool:
        """Make a new request wait if another request is being tried alone. Return True if it has to
        wait."""
        if self._suspects.is_alone:
            self._deferred[_uid(entry)] = entry
        return self._suspects.is_alone

    def remove_deferred(self, entry: Entry) -> bool:
        """Remove a request from those that wait for the end of a trial. Return True if it was
        waiting."""
        return self._deferred.pop(_uid(entry), None) is not None

    def is_cleared(self, entries: Iterable[Entry], now: float) -> bool:
        """Return True if all requests on trial have finished or have passed the point of the
        crash."""
        emitted = {_uid(entry): _emitted_tokens(entry) for entry in entries if not entry.is_over}
        return self._suspects.is_cleared(emitted, now)


def _uid(entry: Entry) -> int:
    return entry.submit.uid


def _emitted_tokens(entry: Entry) -> int:
    """Return the mean number of emitted tokens per answer, rounded down."""
    return sum(len(answer.token_ids) for answer in entry.answers) // len(entry.answers)
