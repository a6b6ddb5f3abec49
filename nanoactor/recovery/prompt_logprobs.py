"""Log-probabilities of a request's prompt, as far as they have arrived."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.requests.outputs import Logprobs
from nanoactor.text.scores import ReportedRun


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, which arrive in pieces. A request's journal entry
    collects them here, and emits them once all have arrived."""

    def __init__(self, is_wanted: bool) -> None:
        """`is_wanted` is True if the request asks for log-probabilities of its prompt."""
        self._is_wanted = is_wanted
        self.values: list[Logprobs | None] = [None]
        """Log-probabilities by prompt token, as far as they have arrived; None for the first
        token, which follows no other."""
        self._has_output = False
        """True if the reader has already received an output."""

    def is_complete(self, length: int) -> bool:
        """Return True if the values of all `length` prompt tokens have arrived, or if none are
        wanted."""
        return not self._is_wanted or len(self.values) == length

    def add(self, run: ReportedRun, token_ids: Sequence[int]) -> None:
        """Append log-probabilities for the next tokens of a prompt with these token ids."""
        for own, top in run.logprobs:
            self.values.append({token_ids[len(self.values)]: own} | top)

    def forget_partial(self, length: int) -> None:
        """Forget the values if they are incomplete. `length` is the number of prompt tokens."""
        if not self.is_complete(length):
            self.values = [None]

    def emit(self, length: int, is_delta: bool) -> list[Logprobs | None] | None:
        """Return the values for the reader's next output; None if they are incomplete or not
        wanted, or if `is_delta` is True and the reader has already received an output. `length` is
        the number of prompt tokens."""
        is_due = self._is_wanted and not (is_delta and self._has_output)
        self._has_output = True
        return self.values if is_due and self.is_complete(length) else None
