"""The time a step may take before its device counts as stalled; pure."""

from __future__ import annotations

_SMALL = 64
"""Up to this many tokens, a step's time is dominated by reading the weights."""
_FORGET = 0.999
"""Decay of a slow step's weight per later step, as compilations happen only once."""
_MARGIN = 10.0
"""Factor by which a step may exceed the slowest recent one."""


class StepDeadline:
    """A deadline that adapts to finished steps."""

    def __init__(self) -> None:
        self._small_seconds = 0.0
        self._token_seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` tokens took `seconds`."""
        if tokens <= _SMALL:
            self._small_seconds = max(seconds, _FORGET * self._small_seconds)
        else:
            self._token_seconds = max(seconds / tokens, _FORGET * self._token_seconds)

    def seconds(self, tokens: int) -> float:
        """Return the time limit, in seconds, for a step of `tokens` tokens."""
        return _MARGIN * (self._small_seconds + self._token_seconds * tokens)
