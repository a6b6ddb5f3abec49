"""A worker thread for long calls into libraries that release the GIL. On an event loop's thread,
such calls would block the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from nanoactor.runtime.native import native_calls

_LAST_WORK = 1.0
"""Seconds for which `close` waits for the current work item."""


class WorkerThread:
    """Thread that executes work items in order. It starts with the first item."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the thread."""
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def put(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Queue `work`. The thread calls it and then calls `done` with its result, or with the
        `Exception` that it raised.

        Raises `RuntimeError` if the thread cannot be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._work.put((work, done))

    def _run(self) -> None:
        while (item := self._work.get()) is not None and not self._stopping:
            work, done = item
            try:
                with native_calls():
                    result = work()
            except Exception as error:
                result = error
            if not self._stopping:  # the loop may be gone
                done(result)

    def close(self) -> None:
        """End the thread after the current work item, whose result is discarded. Waits up to one
        second."""
        self._stopping = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout=_LAST_WORK)
