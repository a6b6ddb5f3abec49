"""The time a step may take before its device counts as stalled; pure."""

from __future__ import annotations

_SMALL = 64
"""Up to so many tokens a step's time is that of reading the weights."""
_FORGET = 0.999
"""What is left of a slow step's weight after each later one: compilations are once."""
_MARGIN = 10.0
"""How much slower than the slowest lately a step may be."""


class StepDeadline:
    """Learns from the steps that are done."""

    def __init__(self) -> None:
        self._small_seconds = 0.0
        self._token_seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens <= _SMALL:
            self._small_seconds = max(seconds, _FORGET * self._small_seconds)
        else:
            self._token_seconds = max(seconds / tokens, _FORGET * self._token_seconds)

    def seconds(self, tokens: int) -> float:
        """Return the time limit, in seconds, for a step of `tokens` tokens."""
        return _MARGIN * (self._small_seconds + self._token_seconds * tokens)
