"""Readmission of requests after deaths of processes. Requests that may have caused them are tried
separately."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from nanoactor.recovery.journal import Entry
from nanoactor.recovery.suspects import Suspects
from nanoactor.runtime.recovery import Death

log = logging.getLogger("nanoactor.engine")

# Kinds of node that also handle waiting requests.
_AT_THE_DOOR = ("tokenizer", "vision")


class Readmission:
    """Readmits requests after deaths: all at once, unless some of them may be the cause. Those run
    separately (see `Suspects`)."""

    def __init__(self, most_at_work: int) -> None:
        """`most_at_work` is the maximum number of requests that run at once: the first by priority
        and arrival."""
        self._most = most_at_work
        self._suspects = Suspects()
        self.trials = 0
        """Number of trials so far."""
        self._kept: dict[int, Entry] = {}
        """Requests that wait for the end of a trial, by their first uid."""

    @property
    def is_trial(self) -> bool:
        """Return True if a trial is running."""
        return bool(self._suspects.on_trial)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for the end of a trial."""
        return len(self._kept)

    def note_deaths(
        self,
        deaths: Sequence[Death],
        entries: Iterable[Entry],
        is_at: Callable[[Entry, str], bool],
        now: float,
    ) -> tuple[Entry, Death, int] | None:
        """Record deaths at time `now`, in seconds; `is_at` returns True if a request may have been
        running on a node. If the request that caused one of the deaths is known, return it, that
        death, and the number of deaths that it explains, else None."""
        living = [entry for entry in entries if not entry.over and _uid(entry) not in self._kept]
        living.sort(key=lambda entry: (entry.submit.spec.priority, _uid(entry)))
        self._kept = {}
        # Of several deaths at once only one is examined, as the others may be its consequences.
        death = next((death for death in deaths if death.is_evidence), None) or deaths[0]
        kind = death.node.partition(".")[0]
        at_work = living if kind in _AT_THE_DOOR else living[: self._most]
        there = [_uid(entry) for entry in at_work if death.is_evidence and is_at(entry, death.node)]
        by_uid = {_uid(entry): entry for entry in living}
        told = {uid: _told(entry) for uid, entry in by_uid.items()}
        verdict = self._suspects.note_death(told, there, kind, now)
        return None if verdict is None else (by_uid[verdict.request], death, verdict.deaths)

    def admit(self, entries: Iterable[Entry], now: float) -> Sequence[Entry]:
        """Return the requests that resume now; the others wait for the end of the trial."""
        living = {_uid(entry): entry for entry in entries if not entry.over}
        told = {uid: _told(entry) for uid, entry in living.items()}
        chosen = self._suspects.admit(told, now)
        if chosen is None:
            return list(living.values())
        self.trials += 1
        log.warning(
            "%d requests may have killed a process; they are retried %s",
            len(self._suspects.on_trial),
            "with no other request running"
            if self._suspects.is_alone
            else "separately from other suspects",
        )
        self._kept = {uid: entry for uid, entry in living.items() if uid not in chosen}
        return [entry for uid, entry in living.items() if uid in chosen]

    def admit_next(self, now: float) -> Sequence[Entry]:
        """Return the requests to admit after a trial: all that were waiting, or the next group to
        try."""
        kept, self._kept = self._kept, {}
        return self.admit(kept.values(), now)

    def keep(self, entry: Entry) -> bool:
        """Make a new request wait if another one is being tried alone; return True if it has to
        wait."""
        if self._suspects.is_alone:
            self._kept[_uid(entry)] = entry
        return self._suspects.is_alone

    def let_go(self, entry: Entry) -> bool:
        """Remove a request from those that wait; return True if it was waiting."""
        return self._kept.pop(_uid(entry), None) is not None

    def is_cleared(self, entries: Iterable[Entry], now: float) -> bool:
        """Return True if all requests on trial have finished or passed the point of the crash."""
        told = {_uid(entry): _told(entry) for entry in entries if not entry.over}
        return self._suspects.is_cleared(told, now)


def _uid(entry: Entry) -> int:
    return entry.submit.uid


def _told(entry: Entry) -> int:
    """Return the average number of tokens emitted per answer."""
    return sum(len(answer.token_ids) for answer in entry.answers) // len(entry.answers)
