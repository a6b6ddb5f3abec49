"""Detection of requests that kill replicas.

A request whose tokens reliably crash an engine crashes one replica after another as it resumes. A
request that was running at two deaths, without progress between them, becomes a *suspect*. It
resumes in a *trial*: alone, on a replica that gets no other requests. If that replica dies too, the
request is the cause. Deaths with external causes look the same, so an innocent suspect is merely
delayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nanoactor.recovery.suspects import CLEARING_TOKENS, MAX_READER_LAG, TRIAL_SECONDS

_DELIVERY_SECONDS = 2.0
"""Time within which computed tokens reach the reader even if steps are slow, in seconds."""


@dataclasses.dataclass(slots=True)
class _Record:
    """State of a request at the last death of a replica that ran it."""

    tokens: int
    """Number of tokens that the reader had received."""
    since: float
    """Time at which the request resumed after the death. Until then, the time of the death."""


class Trials:
    """Detector of requests that kill replicas. Requests are identified by uid, and times are in
    seconds."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self.suspects: dict[int, None] = {}
        """Requests that wait for a trial (to run alone), the next one first."""
        self.on_trial: int | None = None
        self._trial_tokens, self._trial_start = 0, 0.0
        """Number of tokens that the reader had received at the start of the current trial, and the
        time of that start."""

    def note_death(
        self, tokens_sent: Mapping[int, int], now: float, *, is_alone: bool = False
    ) -> int | None:
        """Record that a replica died or hung. Return the request that caused it, or None if that is
        not known.

        `tokens_sent` maps each request that ran there to the number of tokens its reader has
        received. `is_alone` is True if the replica was reserved for a trial, in which one request
        runs alone.
        """
        if is_alone and self.on_trial is not None and list(tokens_sent) == [self.on_trial]:
            culprit = self.on_trial
            self.forget(culprit)
            return culprit
        for request, tokens in tokens_sent.items():
            if request == self.on_trial:  # it did not run alone, so this proves nothing
                continue
            last_record = self._records.get(request)
            if last_record is not None and _is_same_point(
                tokens - last_record.tokens, now - last_record.since
            ):
                self.suspects[request] = None
            self._records[request] = _Record(tokens, now)
        return None

    def note_resumed(self, request: int, now: float) -> None:
        """Record the time at which a request resumed after the death of its replica."""
        if (record := self._records.get(request)) is not None:
            record.since = now

    @property
    def next_suspect(self) -> int | None:
        """Next request to run alone. None if there is none, or if a trial is running."""
        return None if self.on_trial is not None else next(iter(self.suspects), None)

    def begin(self, request: int, tokens: int, now: float) -> None:
        """Record the start of a trial, in which the request runs alone on a replica. `tokens` is
        the number of tokens that the request's reader has received."""
        del self.suspects[request]
        self.on_trial, self._trial_tokens, self._trial_start = request, tokens, now

    def is_cleared(self, tokens: int, now: float) -> bool:
        """Return True if the request on trial has run past the point at which replicas died.
        `tokens` is the number of tokens that its reader has received so far."""
        new_tokens, seconds = tokens - self._trial_tokens, now - self._trial_start
        return (
            new_tokens >= CLEARING_TOKENS
            or seconds > TRIAL_SECONDS
            or (seconds > 2 * _DELIVERY_SECONDS and new_tokens >= 4)
        )

    def cancel_trial(self) -> None:
        """Cancel the current trial (the run of one request alone), if there is one. Its request
        becomes the next suspect again."""
        if self.on_trial is not None:
            self.suspects = {self.on_trial: None, **self.suspects}
            self.on_trial = None

    def forget(self, request: int) -> None:
        """Forget a request that has finished, or that is no longer a suspect."""
        self._records.pop(request, None)
        self.suspects.pop(request, None)
        if self.on_trial == request:
            self.on_trial = None


def _is_same_point(tokens: int, seconds: float) -> bool:
    """Return True if a request made so little progress between two deaths (`tokens` tokens in
    `seconds` seconds) that both may have occurred at the same point of its output."""
    return tokens < MAX_READER_LAG and (seconds < _DELIVERY_SECONDS or tokens < 2)
