"""Requests suspected of killing replicas: a suspect runs alone, and a third death convicts it.

A request whose tokens reliably crash an engine crashes the next one too when it resumes, replica by
replica. One that was present at two deaths, without progress between them, is a suspect. It resumes
alone: its replica gets nothing else meanwhile. If that one dies too, the request is the cause.
External deaths look the same from here, so being suspected costs nothing but waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nanoactor.recovery.suspects import NEXT_TO_NOTHING, TRIAL_SECONDS, WELL_PAST

_SOON = 2.0
"""Seconds within which computed tokens reach the reader, even slow tokens."""


@dataclasses.dataclass(slots=True)
class _Record:
    """A request at a death."""

    tokens: int
    """Number of tokens it had been sent."""
    since: float
    """When it resumed."""


class Trials:
    """Detection of requests that kill replicas. Requests are numbers, times are seconds."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self.suspects: dict[int, None] = {}
        """Those that wait to run alone, the first one first."""
        self.on_trial: int | None = None
        self._tokens, self._began = 0, 0.0
        """Of the one on trial: the tokens it had been sent, and when it started to run alone."""

    def note_death(
        self, told: Mapping[int, int], now: float, *, is_alone: bool = False
    ) -> int | None:
        """Note the death or hang of a replica. `told`: the requests that it ran, and the number of
        tokens sent to each; `is_alone`: it ran only the request on trial. Return the request that
        caused the death, if known."""
        if is_alone and self.on_trial is not None and list(told) == [self.on_trial]:
            culprit = self.on_trial
            self.forget(culprit)
            return culprit
        for request, tokens in told.items():
            if request == self.on_trial:  # a part of it ran elsewhere, too: that proves nothing
                continue
            before = self._records.get(request)
            if before is not None and _was_near(tokens - before.tokens, now - before.since):
                self.suspects[request] = None
            self._records[request] = _Record(tokens, now)
        return None

    def note_going_on(self, request: int, now: float) -> None:
        """Record the time at which a request that was present at a death resumed."""
        if (record := self._records.get(request)) is not None:
            record.since = now

    @property
    def next(self) -> int | None:
        """Return the next request to run alone, or None while one does or if there is none."""
        return None if self.on_trial is not None else next(iter(self.suspects), None)

    def begin(self, request: int, tokens: int, now: float) -> None:
        """Note that a suspect has started to run alone."""
        del self.suspects[request]
        self.on_trial, self._tokens, self._began = request, tokens, now

    def is_cleared(self, tokens: int, now: float) -> bool:
        """Return True if the request on trial is past the point of the crash after `tokens`
        tokens."""
        more, seconds = tokens - self._tokens, now - self._began
        return more >= WELL_PAST or seconds > TRIAL_SECONDS or (seconds > 2 * _SOON and more >= 4)

    def put_back(self) -> None:
        """Cancel the trial: its replica has left."""
        if self.on_trial is not None:
            self.suspects = {self.on_trial: None, **self.suspects}
            self.on_trial = None

    def forget(self, request: int) -> None:
        """Forget a request that is finished or cleared."""
        self._records.pop(request, None)
        self.suspects.pop(request, None)
        if self.on_trial == request:
            self.on_trial = None


def _was_near(tokens: int, seconds: float) -> bool:
    """Return True if a request may have been at the same point in two deaths."""
    return tokens < NEXT_TO_NOTHING and (seconds < _SOON or tokens < 2)
