"""Limit on each client's answers in progress, so that no client can fill the queue."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from nanoactor.server.errors import RETRY_AFTER, APIError


class Shares:
    """Counter of the answers in progress of each client. A client is identified by its API key, or
    by its address if no keys are set."""

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum number of answers per client, waiting or running."""
        self._limit = limit
        self._in_progress: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of clients with answers in progress."""
        return len(self._in_progress)

    @contextlib.contextmanager
    def hold(self, client: str, answers: int) -> Iterator[None]:
        """Count a client's answers while they are in progress; raise `APIError` if there are too
        many."""
        if self._in_progress[client] + answers > self._limit:
            text = (
                f"this client has {self._in_progress[client]} answers in progress and has "
                f"requested {answers} more, but at most {self._limit} are allowed at once "
                "(--max-answers-per-client)"
            )
            self._forget_if_idle(client)
            headers = {"Retry-After": RETRY_AFTER}
            raise APIError(429, text, code="too_many_answers", headers=headers)
        self._in_progress[client] += answers
        try:
            yield
        finally:
            self._in_progress[client] -= answers
            self._forget_if_idle(client)

    def _forget_if_idle(self, client: str) -> None:
        if not self._in_progress[client]:
            del self._in_progress[client]
