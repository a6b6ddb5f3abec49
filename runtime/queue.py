"""The portable transport, which sends records through a pipe with a thread at either end.

Each pipe has one writer and one reader. `multiprocessing.Queue` is not used, because its named
semaphores would remain after SIGKILL. Every record is copied twice, and two threads are woken. The
transport serves platforms without memfd, and is a baseline for benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from nanoactor.runtime.codec import HEADER, INLINE_BYTES, KIND_ARRAYS, Encoded, decode
from nanoactor.runtime.errors import RecordTooLarge
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.transport import Deliver, EdgeStatistics, Fatal


@dataclasses.dataclass(frozen=True, slots=True)
class QueueSenderEnd:
    """Picklable description of the pipes' writing ends, one pipe per reader, for the process that
    will open them."""

    pipes: tuple[int, ...]
    capacity: int
    debug: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors of the pipes' writing ends."""
        return self.pipes

    def remapped(self, mapping: Mapping[int, int]) -> QueueSenderEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        return dataclasses.replace(self, pipes=tuple(mapping[pipe] for pipe in self.pipes))

    def open(self) -> QueueSender:
        """Return a sender that owns the descriptors. Starts one writing thread per pipe."""
        return QueueSender(self)


@dataclasses.dataclass(frozen=True, slots=True)
class QueueReceiverEnd:
    """Picklable description of one pipe's reading end, for the process that will open it."""

    pipe: int
    debug: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptor of the pipe's reading end."""
        return (self.pipe,)

    def remapped(self, mapping: Mapping[int, int]) -> QueueReceiverEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        return dataclasses.replace(self, pipe=mapping[self.pipe])

    def open(self) -> QueueReceiver:
        """Return a receiver that owns the descriptor."""
        return QueueReceiver(self)


def create_queue(
    readers: int, capacity: int, debug: bool = False
) -> tuple[QueueSenderEnd, list[QueueReceiverEnd]]:
    """Create one pipe per reader, and return the writing ends and one reading end per reader.

    `capacity` is the maximum number of bytes that the writer queues for each reader. `debug` adds a
    checksum to every record.
    """
    pairs = [os.pipe() for _ in range(readers)]
    receivers = [QueueReceiverEnd(reading, debug) for reading, _ in pairs]
    return QueueSenderEnd(tuple(writing for _, writing in pairs), capacity, debug), receivers


class QueueSender:
    """Sender that passes each record to one writing thread per reader."""

    def __init__(self, end: QueueSenderEnd) -> None:
        self.statistics = EdgeStatistics()
        self.sent_ns = 0
        self.inline = 0 if end.debug else INLINE_BYTES
        self._end = end
        self._sequence = 0
        self._writers = [_PipeWriter(fd) for fd in end.pipes]

    @property
    def max_record(self) -> int:
        """Maximum size of a record in bytes: half the capacity, as for a ring of the same size."""
        return self._end.capacity // 2

    def try_send(self, encoded: Encoded) -> bool:
        """Queue one record for every reader. Return False, without queueing it, if some reader's
        queue has no room.

        Raises `RecordTooLarge` if the record is larger than half the capacity.
        """
        if encoded.nbytes > self.max_record:
            raise RecordTooLarge(
                f"a record has {encoded.nbytes} bytes, but the limit of its edge is "
                f"{self.max_record}"
            )
        if any(w.waiting + encoded.nbytes > self._end.capacity for w in self._writers):
            self.statistics.waits += 1
            return False
        record = encoded.to_bytes(self._sequence, self._end.debug)
        self.sent_ns = time.monotonic_ns()
        self._sequence += 1
        for writer in self._writers:
            writer.put(record)
        self.statistics.messages += 1
        self.statistics.bytes += encoded.nbytes
        return True

    def has_unread(self) -> bool:
        """Return True if records wait to be written to a pipe. Records inside a pipe count as
        read."""
        return any(writer.waiting for writer in self._writers)

    def when_writable(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, after a record was written to the pipe with the most
        queued bytes, or soon if no bytes are queued."""
        max(self._writers, key=lambda writer: writer.waiting).when_written(loop, callback)

    def close(self) -> None:
        """Make each writing thread finish its queued records and close its pipe. Waits up to one
        second per thread."""
        for writer in self._writers:
            writer.close()


class _PipeWriter:
    """A thread that writes records to one pipe. `waiting` is the number of bytes queued for it."""

    def __init__(self, descriptor: int) -> None:
        self.waiting = 0
        self._lock = threading.Lock()
        self._callbacks: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._records: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._pipe = Connection(descriptor, readable=False)
        self._thread = threading.Thread(target=self._run, name="nanoactor-pipe-out", daemon=True)
        self._thread.start()

    def put(self, record: bytearray) -> None:
        with self._lock:
            self.waiting += len(record)
        self._records.put(record)

    def when_written(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        with self._lock:
            if self.waiting:
                if (loop, callback) not in self._callbacks:
                    self._callbacks.append((loop, callback))
                return
        loop.call_soon(callback)

    def _run(self) -> None:
        # The supervisor handles the death of a reader; here it only ends the writing.
        with contextlib.suppress(OSError):
            while (record := self._records.get()) is not None:
                self._pipe.send_bytes(record)
                with self._lock:
                    self.waiting -= len(record)
                    callbacks, self._callbacks = self._callbacks, []
                for loop, callback in callbacks:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(callback)
        self._pipe.close()

    def close(self) -> None:
        self._records.put(None)
        self._thread.join(timeout=1.0)


class QueueReceiver:
    """Receiver whose thread reads records from the pipe and passes them to the loop in batches."""

    def __init__(self, end: QueueReceiverEnd) -> None:
        self.statistics = EdgeStatistics()
        self._end = end
        self._pipe = Connection(end.pipe, writable=False)
        self._sequence = 0
        self._lock = threading.Lock()
        self._records: deque[bytes] = deque()
        self._backlog = 0
        self._drain_callbacks: list[Callable[[], None]] = []
        self._is_drain_scheduled = False
        """True if `_drain` is already scheduled on the loop; it will also process records that are
        appended until it runs."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver
        self._fatal: Fatal
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, fatal: Fatal) -> None:
        """Start the reading thread. From now on, every record is decoded and delivered on the
        loop."""
        self._loop, self._deliver, self._fatal = loop, deliver, fatal
        self._thread = threading.Thread(target=self._run, name="nanoactor-pipe-in", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Number of records of the current batch that are not delivered yet."""
        return self._backlog

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after the current batch is delivered."""
        if callback not in self._drain_callbacks:
            self._drain_callbacks.append(callback)

    def _run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                record = self._pipe.recv_bytes()
                with self._lock:
                    self._records.append(record)
                    wake, self._is_drain_scheduled = not self._is_drain_scheduled, True
                if wake and not self._wake():
                    break
        self._pipe.close()

    def _wake(self) -> bool:
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _drain(self) -> None:
        try:
            self.statistics.waits += 1
            with self._lock:
                records, self._records = self._records, deque()
                self._is_drain_scheduled = False
            while records and self._loop is not None:
                record = records.popleft()
                self._backlog = len(records)
                self._read(record)
            callbacks, self._drain_callbacks = self._drain_callbacks, []
            for callback in callbacks if self._loop is not None else ():
                callback()
        except BaseException as error:
            self._fatal(error)

    def _read(self, record: bytes) -> None:
        nbytes, kind, _, sent, _, _ = HEADER.unpack_from(record)
        value = decode(record, self._sequence, self._end.debug)
        self._sequence += 1
        self.statistics.messages += 1
        self.statistics.bytes += nbytes
        self.statistics.waiting_ns += time.monotonic_ns() - sent
        # The record has its own memory, which is never reused, so no view can outlive it.
        lease = Lease(None, lambda: None) if kind == KIND_ARRAYS else None
        self._deliver(value, lease, sent)

    def close(self) -> None:
        """Stop delivering messages. The reading thread ends when the writer closes its end of the
        pipe."""
        self._loop = None
        if self._thread is None:
            self._pipe.close()
