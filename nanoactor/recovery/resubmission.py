"""Resubmission of requests after a restart: at once, or in trials if some of them may have crashed
a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from nanoactor.recovery.journal import Entry, Journal
from nanoactor.recovery.readmission import Readmission
from nanoactor.recovery.suspects import TRIAL_SECONDS
from nanoactor.runtime.actor import Context


class Resubmission:
    """Sends the requests that `Readmission` chooses: after a restart, and at the end of each trial
    (a run of requests that may have crashed a process). The frontend creates one per start."""

    def __init__(
        self,
        readmission: Readmission,
        journal: Journal,
        send_again: Callable[[Entry], None],
        context: Context,
    ) -> None:
        """`send_again` sends the unfinished sequences of a request to the other actors."""
        self._readmission, self._journal = readmission, journal
        self._send_again, self._context = send_again, context

    def resume_all(self) -> None:
        """Send all unfinished requests again, except those that wait for the end of a trial."""
        now = self._context.now()
        self._resume(self._readmission.admit(self._journal.entries, now))

    def check_trial(self) -> None:
        """End the current trial if all its requests have finished or have passed the point of the
        crash."""
        if self._readmission.is_cleared(self._journal.entries, self._context.now()):
            self._end_trial(self._readmission.trials)

    def _resume(self, entries: Sequence[Entry]) -> None:
        """Send these requests again. If they form a trial, it ends after `TRIAL_SECONDS` at the
        latest."""
        for entry in entries:
            self._send_again(entry)
        if self._readmission.is_trial:
            end = functools.partial(self._end_trial, self._readmission.trials)
            self._context.call_later(TRIAL_SECONDS, end)

    def _end_trial(self, trial: int) -> None:
        if self._readmission.is_trial and trial == self._readmission.trials:
            self._resume(self._readmission.admit_next(self._context.now()))
