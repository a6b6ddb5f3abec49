"""Decoding of images and videos on a thread."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.runtime.native import native_calls
from nanoactor.vision.media import Media, MediaReader, ReadItem, Unusable

_MAX_REASON_CHARS = 300

Decoded = Callable[[int, int, NDArray[np.uint8] | Unusable], None]
"""Callback that receives the times at which decoding began and ended, in ns of the monotonic clock,
and the pixels or the reason why there are none."""


class _Cancelled(Exception):
    """Raised if the pixels being decoded are no longer needed."""


class DecodingThread:
    """Thread that decodes images and videos and reads the headers of videos, one item at a time.
    Used by the vision worker actor."""

    def __init__(self, is_wanted: Callable[[int], bool]) -> None:
        """`is_wanted` returns True if the pixels with a given number are still needed. It is called
        on the thread."""
        self._is_wanted = is_wanted
        self.frames = 0
        """Number of frames that were examined or whose decoding has begun."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, reader: MediaReader) -> None:
        """Start the thread, which reads and decodes with `reader`."""
        self._reader = reader
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def read(self, media: Media) -> ReadItem | Unusable:
        """Return the key (content hash) and the grid (size in tokens) of an image or video, or why
        it cannot be used. Runs on the calling thread."""
        try:
            with native_calls():
                return self._reader.read(media, self._note_header)
        except Exception as error:
            return _unusable(error)

    def read_later(self, media: Media, done: Callable[[ReadItem | Unusable], None]) -> None:
        """Queue the headers of a video to be read. `done` is called on the thread with the result
        of `read`."""
        self._work.put(functools.partial(self._read, media, done))

    def decode(self, number: int, media: Media, done: Decoded) -> None:
        """Queue an image or video to be decoded. `number` identifies its pixels. `done` is called
        on the thread, unless the pixels are no longer needed by then."""
        self._work.put(functools.partial(self._decode, number, media, done))

    def _run(self) -> None:
        """Run the thread. Pillow releases the GIL while it decodes."""
        while (work := self._work.get()) is not None and not self._stopping:
            work()

    def _read(self, media: Media, done: Callable[[ReadItem | Unusable], None]) -> None:
        found = self.read(media)
        if not self._stopping:
            done(found)

    def _decode(self, number: int, media: Media, done: Decoded) -> None:
        begin = time.monotonic_ns()
        try:
            with native_calls():
                result: NDArray[np.uint8] | Unusable = self._reader.decode(
                    media, functools.partial(self._note_frame, number)
                )
        except _Cancelled:
            return
        except Exception as error:
            result = _unusable(error)
        if not self._stopping:  # the event loop may be gone
            done(begin, time.monotonic_ns(), result)

    def _note_header(self) -> None:
        """Record progress for the watchdog. Called before each frame of a video is examined."""
        self.frames += 1

    def _note_frame(self, number: int) -> None:
        """Count a frame that is about to be decoded. Raises `_Cancelled` if its pixels are no
        longer needed."""
        if self._stopping or not self._is_wanted(number):
            raise _Cancelled
        self.frames += 1

    def close(self) -> None:
        """Stop the thread after the current image; wait at most 1 s."""
        self._stopping = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def _unusable(error: Exception) -> Unusable:
    """Convert an error to the reason why an image cannot be used. No image may crash the
    engine."""
    if isinstance(error, MemoryError):
        return Unusable("there is not enough memory to decode the image", is_machine_fault=True)
    known = isinstance(error, InvalidRequest)
    text = str(error) if known else f"the image cannot be decoded: {error!r}"
    return Unusable(text[:_MAX_REASON_CHARS])
