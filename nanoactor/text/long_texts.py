"""Long texts are encoded on a thread: others are not held up by them, as the library lets go of the
interpreter meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LONG_BYTES = 64 * 1024
"""A text of so many characters takes some 20 ms."""


class LongTexts:
    """A thread that does one piece of work after the other; it starts with the first."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have `done` be called, on the thread, with what `work` returns, or with the `Exception`
        that it raises. Raises `RuntimeError` where the machine has no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="long texts", daemon=True)
            thread.start()
            self._thread = thread
        self._work.put((work, done))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def close(self) -> None:
        """End the thread behind the text at hand."""
        if self._thread is not None:
            while not self._work.empty():
                self._work.get()
            self._work.put(None)
