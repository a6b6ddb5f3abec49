"""The time limit of a step, after which its device counts as stalled."""

from __future__ import annotations

_SMALL_TOKENS = 64
"""Number of tokens up to which reading the weights dominates a step's duration."""
_DECAY = 0.999
"""Factor by which the recorded maximum decays with each step, so that steps which were slow because
they compiled code are forgotten."""
_MARGIN = 10.0
"""Factor by which a step may exceed the longest recent one."""


class StepDeadline:
    """A time limit for steps that adapts to the durations of finished steps."""

    def __init__(self) -> None:
        self._small_seconds = 0.0
        self._token_seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` tokens took `seconds` seconds."""
        if tokens <= _SMALL_TOKENS:
            self._small_seconds = max(seconds, _DECAY * self._small_seconds)
        else:
            self._token_seconds = max(seconds / tokens, _DECAY * self._token_seconds)

    def seconds(self, tokens: int) -> float:
        """Return the time limit, in seconds, for a step of `tokens` tokens; 0 before any step has
        been recorded."""
        return _MARGIN * (self._small_seconds + self._token_seconds * tokens)
