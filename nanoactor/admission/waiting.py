"""The queue of requests that wait for their first token, and the limits on its size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nanoactor.errors import EngineOverloaded, InvalidRequest
from nanoactor.options.config import EngineConfig
from nanoactor.recovery.journal import Entry


class WaitingQueue:
    """The sequences that wait for their first token, and the total size of their prompts. The
    frontend uses it to reject requests for which there is no room."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._uids: set[int] = set()
        self.tokens = self.media_bytes = 0
        """Sums over all waiting requests: prompt tokens (bytes of text until a prompt is tokenized)
        and bytes of images and videos."""
        self._progress: asyncio.Event | None = None
        """Event that is set, and then dropped, when a request stops waiting; None if no caller
        waits for it."""

    def __len__(self) -> int:
        """Return the number of sequences that wait."""
        return len(self._uids)

    def __contains__(self, uid: int) -> bool:
        """Return True if the sequence with this uid waits."""
        return uid in self._uids

    def check_room(self, entries: Sequence[Entry]) -> None:
        """Raise `EngineOverloaded` if the queue has no room for these requests, or `InvalidRequest`
        if there are more of them than may ever wait."""
        config, requests = self._config, sum(len(entry.waiting_uids) for entry in entries)
        charge, media = sum(e.charge for e in entries), sum(e.media_bytes for e in entries)
        if requests > config.max_waiting_requests:
            raise InvalidRequest(
                f"{requests} answers were requested at once, but at most "
                f"{config.max_waiting_requests} may wait (max_waiting_requests); request fewer "
                "answers, or raise max_waiting_requests"
            )
        if len(self._uids) + requests > config.max_waiting_requests:
            raise EngineOverloaded(
                f"{len(self._uids)} requests are already waiting, and "
                f"max_waiting_requests is {config.max_waiting_requests}; try again later"
            )
        if self.tokens and self.tokens + charge > config.max_waiting_tokens:
            raise EngineOverloaded(
                f"{self.tokens} prompt tokens are already waiting, and "
                f"max_waiting_tokens is {config.max_waiting_tokens}; try again later"
            )
        if self.media_bytes and self.media_bytes + media > config.max_waiting_media_bytes:
            raise EngineOverloaded(
                f"{self.media_bytes} bytes of images and videos are already waiting, and "
                f"max_waiting_media_bytes is {config.max_waiting_media_bytes}; try again later"
            )

    def add(self, entry: Entry) -> None:
        """Count a new request and its sequences as waiting."""
        self._uids.update(entry.waiting_uids)
        self.tokens += entry.charge
        self.media_bytes += entry.media_bytes

    def set_prompt_length(self, entry: Entry, tokens: int) -> None:
        """Count a request with the number of its prompt tokens from now on, instead of the size of
        its text. Does nothing if the request no longer waits."""
        if not entry.has_left_queue:
            self.tokens += tokens - entry.charge
            entry.charge = tokens

    def leave(self, entry: Entry, uid: int) -> None:
        """Stop counting a sequence as waiting. When the first sequence of a request leaves the
        queue, also stop counting the request's prompt tokens and media."""
        self._uids.discard(uid)
        if not entry.has_left_queue:
            entry.has_left_queue = True
            self.tokens -= entry.charge
            self.media_bytes -= entry.media_bytes
        self._notify_progress()

    def clear(self) -> None:
        """Empty the queue, because all requests have ended."""
        self._uids.clear()
        self.tokens = self.media_bytes = 0
        self._notify_progress()

    async def wait_for_capacity(self) -> None:
        """Wait until any waiting request receives its first token or finishes. Return at once if no
        request is waiting."""
        if self._uids:
            self._progress = self._progress or asyncio.Event()
            await self._progress.wait()

    def _notify_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None
