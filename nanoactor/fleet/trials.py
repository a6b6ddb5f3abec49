"""Requests that may be what ends replicas: a suspect runs alone, and a third death convicts it.

A request whose tokens crash an engine for good crashes the next one too, where it goes on, and so
on, replica by replica. One that was there at two deaths, and came no further between them, is a
suspect. It goes on alone: its replica gets nothing else meanwhile. If that dies too, the request is
what kills. Deaths from outside look the same from here, so that being suspected costs nothing but
waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nanoactor.suspects import NEXT_TO_NOTHING, TRIAL_SECONDS, WELL_PAST

_SOON = 2.0
"""Seconds in which what is computed reaches its reader, however slow tokens are."""


@dataclasses.dataclass(slots=True)
class _Record:
    """A request at a death."""

    tokens: int
    """That it had been told."""
    since: float
    """When it went on."""


class Trials:
    """Looks for what kills replicas. Requests are numbers, moments are seconds."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self.suspects: dict[int, None] = {}
        """Those that wait to run alone, the first one first."""
        self.on_trial: int | None = None
        self._tokens, self._began = 0, 0.0
        """Of the one on trial: what it had been told, and when it began to run alone."""

    def note_death(
        self, told: Mapping[int, int], now: float, *, is_alone: bool = False
    ) -> int | None:
        """A replica has died or hung, on which these requests ran, with the tokens that each had
        been told; `is_alone`: it was that of the trial, where nothing else ran. Return the one that
        has killed, where that is known."""
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
        """A request that was there at a death runs again."""
        if (record := self._records.get(request)) is not None:
            record.since = now

    @property
    def next(self) -> int | None:
        """Return which one is to run alone next; None while one does, or where there is none."""
        return None if self.on_trial is not None else next(iter(self.suspects), None)

    def begin(self, request: int, tokens: int, now: float) -> None:
        """A suspect runs, alone."""
        del self.suspects[request]
        self.on_trial, self._tokens, self._began = request, tokens, now

    def is_cleared(self, tokens: int, now: float) -> bool:
        """Return True if the request on trial is past the point of the crash after `tokens`
        tokens."""
        more, seconds = tokens - self._tokens, now - self._began
        return more >= WELL_PAST or seconds > TRIAL_SECONDS or (seconds > 2 * _SOON and more >= 4)

    def put_back(self) -> None:
        """The trial came to nothing: its replica has left."""
        if self.on_trial is not None:
            self.suspects = {self.on_trial: None, **self.suspects}
            self.on_trial = None

    def forget(self, request: int) -> None:
        """A request is over, or cleared."""
        self._records.pop(request, None)
        self.suspects.pop(request, None)
        if self.on_trial == request:
            self.on_trial = None


def _was_near(tokens: int, seconds: float) -> bool:
    """Return True if a request may have been at the same point in two deaths."""
    return tokens < NEXT_TO_NOTHING and (seconds < _SOON or tokens < 2)
