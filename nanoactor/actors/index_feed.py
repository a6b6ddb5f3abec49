"""Changes of the prefix index, for any number of readers in the user's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from nanoactor.errors import NanoactorError
from nanoactor.kv.index_changes import IndexChanges, IndexCopy
from nanoactor.kv.index_events import IndexEvents


class IndexFeed:
    """Sends each reader the whole index first, then its changes, which are merged while the reader
    is busy."""

    def __init__(self) -> None:
        self._copy = IndexCopy()
        self._readers: dict[IndexChanges, asyncio.Event] = {}
        self._error: NanoactorError | None = None

    def forward(self, events: IndexEvents) -> None:
        """Forward changes from the block manager to all readers."""
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
        """Raise an error in all readers, because the engine is gone."""
        self._error = error
        for news in self._readers.values():
            news.set()

    async def read(self) -> AsyncGenerator[IndexEvents, None]:
        """Yield the index and then its changes, until the engine is gone. Raises the error that was
        passed to `end`."""
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
