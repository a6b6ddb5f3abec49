"""Requests are admitted again after deaths, and those that may be what kills are tried apart."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from nanoactor.actors.journal import Entry
from nanoactor.suspects import Suspects

log = logging.getLogger("nanoactor.engine")


class Readmission:
    """Admits requests again after deaths: all at once, unless some may be what kills; then those
    run apart, and all others wait (`Suspects`)."""

    def __init__(self, most_at_work: int) -> None:
        """`most_at_work` is how many requests run at once: those that came first."""
        self._most = most_at_work
        self._suspects = Suspects()
        self.trials = 0
        """How many there were."""
        self._kept: dict[int, Entry] = {}
        """Those that wait, by their first uid."""

    @property
    def is_trial(self) -> bool:
        """Tell whether some run and all others wait."""
        return bool(self._suspects.on_trial)

    @property
    def waiting(self) -> int:
        """Return how many wait for the end of a trial."""
        return len(self._kept)

    def note_death(self, entries: Iterable[Entry]) -> Entry | None:
        """Take note of a death; return who has caused it, where that is known."""
        living = [entry for entry in entries if not entry.over and _uid(entry) not in self._kept]
        living.sort(key=lambda entry: (entry.submit.priority, _uid(entry)))
        self._kept = {}
        at_work = {_uid(entry): entry for entry in living[: self._most]}
        culprit = self._suspects.note_death({uid: _told(e) for uid, e in at_work.items()})
        return None if culprit is None else at_work[culprit]

    def admit(self, entries: Iterable[Entry]) -> Sequence[Entry]:
        """Return those that go on now; the others are kept."""
        living = {_uid(entry): entry for entry in entries if not entry.over}
        told = {uid: _told(entry) for uid, entry in living.items()}
        chosen = self._suspects.admit(told)
        if chosen is None:
            return list(living.values())
        self.trials += 1
        log.warning("one of %d requests may have killed a process: they run apart", len(chosen))
        self._kept = {uid: entry for uid, entry in living.items() if uid not in chosen}
        return [living[uid] for uid in chosen]

    def admit_next(self) -> Sequence[Entry]:
        """Return who goes on when a trial is over: all that were kept, or the next to be tried."""
        kept, self._kept = self._kept, {}
        return self.admit(kept.values())

    def keep(self, entry: Entry) -> bool:
        """Keep a new request where there is a trial; tell whether there is one."""
        if self.is_trial:
            self._kept[_uid(entry)] = entry
        return self.is_trial

    def let_go(self, entry: Entry) -> bool:
        """Keep a request no longer; tell whether it was kept."""
        return self._kept.pop(_uid(entry), None) is not None

    def is_cleared(self, entries: Iterable[Entry]) -> bool:
        """Tell whether none of those on trial is what kills."""
        told = {_uid(entry): _told(entry) for entry in entries if not entry.over}
        return self._suspects.is_cleared(told)


def _uid(entry: Entry) -> int:
    return entry.submit.uid


def _told(entry: Entry) -> int:
    """Tokens of an answer, on average."""
    return sum(len(answer.token_ids) for answer in entry.answers) // len(entry.answers)
