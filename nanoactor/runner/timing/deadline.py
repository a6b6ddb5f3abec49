"""The time that a step may take before its device counts as stalled; pure logic."""

from __future__ import annotations

_SMALL_TOKENS = 64
"""Number of tokens up to which a step's time is dominated by reading the weights."""
_DECAY = 0.999
"""Factor by which the recorded maximum decays with each step, as compilations happen only once."""
_MARGIN = 10.0
"""Factor by which a step may exceed the slowest recent one."""


class StepDeadline:
    """A time limit for steps that adapts to the durations of finished steps."""

    def __init__(self) -> None:
        self._small_seconds = 0.0
        self._token_seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` tokens took `seconds`."""
        if tokens <= _SMALL_TOKENS:
            self._small_seconds = max(seconds, _DECAY * self._small_seconds)
        else:
            self._token_seconds = max(seconds / tokens, _DECAY * self._token_seconds)

    def seconds(self, tokens: int) -> float:
        """Return the time limit, in seconds, for a step of `tokens` tokens."""
        return _MARGIN * (self._small_seconds + self._token_seconds * tokens)
