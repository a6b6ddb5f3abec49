"""Limit on the answers in progress per client, so that no client can fill the whole queue."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from nanoactor.server.errors import RETRY_AFTER, APIError


class Shares:
    """Counts the answers in progress of each client. A client is identified by its API key, or by
    its address if no keys are configured."""

    def __init__(self, limit: int) -> None:
        """Start with no clients. `limit` is the maximum number of waiting and running answers per
        client."""
        self._limit = limit
        self._in_progress: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of clients that have answers in progress."""
        return len(self._in_progress)

    @contextlib.contextmanager
    def hold(self, client: str, answers: int) -> Iterator[None]:
        """Count `answers` answers of a client as in progress until the context ends. Raises
        `APIError` (429) if the client would exceed its limit."""
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
