"""Distribution of changes to the prefix cache index to any number of readers in the user's
process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from nanoactor.errors import NanoactorError
from nanoactor.kv.index_changes import IndexChanges, IndexCopy
from nanoactor.kv.index_events import IndexEvents


class IndexFeed:
    """Feed of the prefix cache index. Each reader receives the whole index first, and then its
    changes, which are merged while the reader is busy."""

    def __init__(self) -> None:
        self._copy = IndexCopy()
        self._readers: dict[IndexChanges, asyncio.Event] = {}
        self._error: NanoactorError | None = None

    def forward(self, events: IndexEvents) -> None:
        """Pass changes to the prefix cache index from the block manager to all readers."""
        self._copy.apply(events)
        for changes, news in self._readers.items():
            if events.cleared:
                changes.republish(())
            for content in map(bytes, events.forgotten):
                changes.forget(content)
            for content in map(bytes, events.remembered):
                changes.remember(content)
            news.set()

    def end(self, error: NanoactorError) -> None:
        """End all readers with `error`, because the engine is gone."""
        self._error = error
        for news in self._readers.values():
            news.set()

    async def read(self) -> AsyncGenerator[IndexEvents, None]:
        """Yield the whole prefix cache index and then its changes. Raises the error passed to `end`
        once the engine is gone."""
        changes, news = IndexChanges(), asyncio.Event()
        changes.republish(self._copy.contents)
        self._readers[changes] = news
        try:
            while self._error is None:
                if (events := changes.drain()) is not None:
                    yield events
                news.clear()
                if not changes and self._error is None:
                    await news.wait()
            raise self._error.with_traceback(None)
        finally:
            del self._readers[changes]
