"""Reading of checkpoint files into the page cache, ahead of the loader that maps them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("nanoactor.weights")

PIECE_BYTES = 64 << 20
"""Number of bytes that are requested at a time."""
WINDOW_BYTES = 2 << 30
"""Maximum distance from the loader, which limits the memory for pages that are not yet loaded."""


class ReadAhead:
    """A thread that asks the kernel for the pages of files in advance.

    A loader that faults pages in one by one waits for the disk on most of them, and the disk then
    waits while a tensor is converted. The thread keeps the disk busy meanwhile. Files should be
    loaded approximately from first to last. Loading is correct without it, only slower.
    """

    def __init__(
        self, paths: Sequence[Path], window: int = WINDOW_BYTES, piece: int = PIECE_BYTES
    ) -> None:
        """Start reading. A checkpoint of at most `piece` bytes is not worth a thread."""
        self._paths = paths
        self._window = window
        self._piece = piece
        self._loaded_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if sum(path.stat().st_size for path in paths) > piece:
            self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
            self._thread.start()

    def advance(self, count: int) -> None:
        """Record that the loader has read `count` more bytes."""
        with self._changed:
            self._loaded_bytes += count
            self._changed.notify()

    def close(self) -> None:
        """Stop reading. Does nothing if the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        previous = 0
        try:
            for path in self._paths:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    for start in range(0, size, self._piece):
                        if not self._may_read(previous + start):
                            return
                        os.posix_fadvise(file.fileno(), start, self._piece, os.POSIX_FADV_WILLNEED)
                previous += size
        except OSError as error:
            log.warning("files are not read ahead, so loading from a disk is slower: %s", error)

    def _may_read(self, position: int) -> bool:
        """Wait until the loader is near `position`. Return False if reading should stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or position < self._loaded_bytes + self._window
            )
            return not self._closed
