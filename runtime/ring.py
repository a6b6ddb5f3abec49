"""The Linux transport: a ring of records in anonymous shared memory, with one writer and one or
more readers.

Shared memory itself is not used for synchronization. The writer stores a record and then adds one
to each reader's *items* eventfd. A reader reads the count from its eventfd and then exactly that
many records. It adds the number of bytes that it no longer needs to its *space* eventfd: it credits
them. The writer reuses only bytes that every reader has credited. The kernel's locking inside these
system calls orders the stores on every processor architecture. No resource has a name, so names
cannot collide, and nothing remains when processes are killed.

A record is contiguous. If it does not fit before the end of the ring, a padding record fills the
rest. A record is at most half the ring, so padding and record together always fit into an empty
ring. A reader credits everything that it has consumed whenever it has drained the ring. If it
credited lazily, the next record might never fit even though the ring is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.runtime.codec import (
    HEADER,
    INLINE_BYTES,
    KIND_ARRAYS,
    KIND_PADDING,
    Encoded,
    decode,
    decode_body,
)
from nanoactor.runtime.errors import RecordTooLarge, RingCorrupted, UnsupportedPlatform
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.transport import Deliver, EdgeStatistics, Fatal

POISON = 0xDB
MIN_CAPACITY = 4096


def ring_capacity(largest_record: int) -> int:
    """Return the smallest valid capacity in bytes, a power of two, of a ring for records of up to
    `largest_record` bytes."""
    return max(MIN_CAPACITY, 1 << (2 * largest_record - 1).bit_length())


@dataclasses.dataclass(frozen=True, slots=True)
class RingSenderEnd:
    """Picklable description of a ring's writing end, for the process that will open it: the memory,
    and an (items, space) pair of eventfds for each reader."""

    memory: int
    events: tuple[tuple[int, int], ...]
    capacity: int
    debug: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors of the memory and of every reader's items and space eventfds."""
        return (self.memory, *(fd for pair in self.events for fd in pair))

    def remapped(self, mapping: Mapping[int, int]) -> RingSenderEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        events = tuple((mapping[items], mapping[space]) for items, space in self.events)
        return dataclasses.replace(self, memory=mapping[self.memory], events=events)

    def open(self) -> RingSender:
        """Map the memory and return a sender that owns the descriptors."""
        return RingSender(self)


@dataclasses.dataclass(frozen=True, slots=True)
class RingReceiverEnd:
    """Picklable description of a ring's reading end, for the process that will open it: the memory
    and this reader's own eventfds."""

    memory: int
    items: int
    space: int
    capacity: int
    debug: bool
    spin_us: float = 0.0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors of the memory and of this reader's items and space eventfds."""
        return (self.memory, self.items, self.space)

    def remapped(self, mapping: Mapping[int, int]) -> RingReceiverEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        memory, items, space = (mapping[number] for number in self.descriptors)
        return dataclasses.replace(self, memory=memory, items=items, space=space)

    def open(self) -> RingReceiver:
        """Map the memory and return a receiver that owns the descriptors."""
        return RingReceiver(self)


def create_ring(
    readers: int, capacity: int, debug: bool = False, spin_us: float = 0.0
) -> tuple[RingSenderEnd, list[RingReceiverEnd]]:
    """Create a ring for one writer and `readers` readers. Each returned end owns its descriptors.

    `capacity` is in bytes, a power of two of at least 4096. `debug` adds a checksum to every record
    and overwrites released space. `spin_us` is the time in microseconds for which a reader that has
    drained its ring polls before it blocks. Raises `UnsupportedPlatform` if there is no memfd or
    eventfd, and `ValueError` if the capacity is invalid.
    """
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        raise UnsupportedPlatform("the ring needs Linux (memfd, eventfd); use transport='queue'")
    if capacity < MIN_CAPACITY or capacity & (capacity - 1):
        raise ValueError(
            f"capacity must be a power of two of at least {MIN_CAPACITY}, got {capacity}"
        )
    memory = os.memfd_create("nanoactor-ring", os.MFD_CLOEXEC)
    # An extra half of the capacity is mapped and never touched, so that a lease's buffer may be
    # rounded up to a power of two past the ring's end (see RingReceiver._buffer).
    os.ftruncate(memory, capacity + capacity // 2)
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    pairs = [(os.eventfd(0, flags), os.eventfd(0, flags)) for _ in range(readers)]
    receivers = [
        RingReceiverEnd(os.dup(memory), os.dup(items), os.dup(space), capacity, debug, spin_us)
        for items, space in pairs
    ]
    return RingSenderEnd(memory, tuple(pairs), capacity, debug), receivers


class RingSender:
    """Sender that writes records into a ring, and tracks how many bytes each reader has released
    for reuse."""

    def __init__(self, end: RingSenderEnd) -> None:
        self.statistics = EdgeStatistics()
        self.sent_ns = 0
        self.inline = 0 if end.debug else INLINE_BYTES
        self._end = end
        self._capacity = end.capacity
        self._view = memoryview(mmap.mmap(end.memory, end.capacity + end.capacity // 2))
        self._items = [items for items, _ in end.events]
        self._spaces = [space for _, space in end.events]
        self._written = 0
        self._credited = [0] * len(end.events)
        self._reusable = self._capacity
        """Position up to which the writer may write: the number of bytes that the slowest reader
        has released, plus the capacity."""
        self._sequence = 0
        self._waiting: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None

    @property
    def max_record(self) -> int:
        """Maximum size of a record in bytes: half the ring's capacity."""
        return self._capacity // 2

    def try_send(self, encoded: Encoded) -> bool:
        """Write one record and notify every reader. Return False if the slowest reader leaves no
        room for it.

        Raises `RecordTooLarge` if the record is larger than half the ring.
        """
        nbytes = encoded.nbytes
        if nbytes > self._capacity // 2:
            raise RecordTooLarge(
                f"a record has {nbytes} bytes, but the limit of its edge is {self.max_record}: "
                f"give the edge a ring of {ring_capacity(nbytes)} bytes"
            )
        at = self._written & (self._capacity - 1)
        room = self._capacity - at
        padding = room if nbytes > room else 0
        end = self._written + padding + nbytes
        if end > self._reusable:
            self._collect_credits()
            if end > self._reusable:
                self.statistics.waits += 1
                return False
        if padding:
            HEADER.pack_into(self._view, at, padding, KIND_PADDING, self._sequence, 0, 0, 0)
            at = 0
        self.sent_ns = encoded.write_into(self._view, at, self._sequence, self._end.debug)
        self._sequence += 1
        self._written = end
        for items in self._items:
            os.eventfd_write(items, 1)
        statistics = self.statistics
        statistics.messages += 1
        statistics.bytes += nbytes
        return True

    def _collect_credits(self) -> None:
        """Read how many bytes each reader has released. In debug mode, overwrite the space that has
        become reusable."""
        for index, space in enumerate(self._spaces):
            with contextlib.suppress(BlockingIOError):
                self._credited[index] += os.eventfd_read(space)
        reusable = min(self._credited) + self._capacity
        if self._end.debug:
            self._poison(self._reusable, reusable)
        self._reusable = reusable

    def _poison(self, start: int, stop: int) -> None:
        while start < stop:
            at = start & (self._capacity - 1)
            size = min(stop - start, self._capacity - at)
            self._view[at : at + size] = bytes([POISON]) * size
            start += size

    def has_unread(self) -> bool:
        """Return True if some reader has not released all records yet."""
        if min(self._credited) < self._written:
            self._collect_credits()
        return min(self._credited) < self._written

    def when_writable(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, after a reader has released space."""
        if self._waiting is None:
            self._waiting = (loop, callback)
            for space in self._spaces:
                loop.add_reader(space, self._on_writable)

    def _on_writable(self) -> None:
        callback = self._stop_waiting()
        self._collect_credits()
        if callback is not None:
            callback()

    def _stop_waiting(self) -> Callable[[], None] | None:
        if self._waiting is None:
            return None
        loop, callback = self._waiting
        self._waiting = None
        for space in self._spaces:
            loop.remove_reader(space)
        return callback

    def close(self) -> None:
        """Release the memory and the descriptors. Readers can still read the records that are in
        the ring."""
        self._stop_waiting()
        self._view = memoryview(b"")
        _close_all(self._end.descriptors)
        self._items, self._spaces = [], []


class RingReceiver:
    """Receiver that reads records in place in a ring, and releases their space to the writer in
    order."""

    def __init__(self, end: RingReceiverEnd) -> None:
        self.statistics = EdgeStatistics()
        self._end = end
        self._capacity = end.capacity
        self._memory: Any = mmap.mmap(end.memory, end.capacity + end.capacity // 2)
        self._view = memoryview(self._memory)
        self._position = 0
        self._sequence = 0
        self._unread_records = 0
        """Number of records that the writer has announced and that have not been read yet."""
        self._held: deque[list[int]] = deque()
        """[end position, 1 if released else 0] of each record that was not reported to the writer
        as reusable yet."""
        self._released_until = 0
        """Position up to which all records have been released."""
        self._credited = 0
        self._drain_callbacks: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver
        self._fatal: Fatal

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, fatal: Fatal) -> None:
        """Deliver every record on the loop from now on."""
        self._loop, self._deliver, self._fatal = loop, deliver, fatal
        loop.add_reader(self._end.items, self._on_items)

    @property
    def backlog(self) -> int:
        """Number of records that the writer has announced and this reader has not read yet."""
        return self._unread_records

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after the backlog has been read."""
        if callback not in self._drain_callbacks:
            self._drain_callbacks.append(callback)

    def _on_items(self) -> None:
        """Read all available records. An exception is passed to `fatal`, because the loop would
        only log it."""
        try:
            self.statistics.waits += 1
            self._read_count()
            deadline = 0.0
            while True:
                while self._unread_records and self._loop is not None:
                    self._read_one()
                    deadline = 0.0
                self._credit()
                self._notify_drained()
                if self._end.spin_us <= 0 or self._loop is None:
                    return
                deadline = deadline or time.perf_counter() + self._end.spin_us * 1e-6
                while not self._read_count():
                    if time.perf_counter() > deadline:
                        return
                self.statistics.spins += 1
        except BaseException as error:
            self._fatal(error)

    def _notify_drained(self) -> None:
        if self._drain_callbacks and self._loop is not None:
            callbacks, self._drain_callbacks = self._drain_callbacks, []
            for callback in callbacks:
                callback()

    def _read_count(self) -> bool:
        try:
            self._unread_records += os.eventfd_read(self._end.items)
        except BlockingIOError:
            return False
        return True

    def _read_one(self) -> None:
        at = self._position & (self._capacity - 1)
        header = HEADER.unpack_from(self._memory, at)
        if header[1] == KIND_PADDING:
            self._position += header[0]
            at = 0
            header = HEADER.unpack_from(self._memory, at)
        nbytes, kind, _, sent, _, _ = header
        if not 0 < nbytes <= self._capacity // 2:
            raise RingCorrupted(f"record {self._sequence} claims a length of {nbytes} bytes")
        self._unread_records -= 1
        self._position += nbytes
        statistics = self.statistics
        statistics.messages += 1
        statistics.bytes += nbytes
        statistics.waiting_ns += time.monotonic_ns() - sent
        if kind == KIND_ARRAYS:
            entry = [self._position, 0]
            self._held.append(entry)
            self._deliver_leased(at, nbytes, entry, sent)
        else:
            sequence, view = self._sequence, self._view
            value = decode_body(self._memory, view, header, sequence, self._end.debug, at)
            self._sequence = sequence + 1
            self._consume()
            self._deliver(value, None, sent)
        if self._position - self._credited > self._capacity // 4:
            self._credit()

    def _consume(self) -> None:
        """Mark the record that was just read as released. It was copied, so no lease refers to
        it."""
        if self._held:
            self._held.append([self._position, 1])
        else:
            self._released_until = self._position

    def _deliver_leased(self, at: int, nbytes: int, entry: list[int], sent: int) -> None:
        buffer = self._buffer(at, nbytes)
        value = decode(buffer, self._sequence, self._end.debug)
        self._sequence += 1
        lease = Lease(buffer, lambda: self._release_record(entry))
        del buffer
        keeps_lease = self._deliver(value, lease, sent)
        del value
        if not keeps_lease:
            lease.release()

    def _buffer(self, at: int, nbytes: int) -> Any:
        """Return a new buffer object that covers one record. All views of the record refer to it,
        so its reference count shows whether a view is still alive.

        ctypes creates a type for each size. Sizes are rounded up to powers of two to limit the
        number of types.
        """
        size = 1 << (nbytes - 1).bit_length()
        return (ctypes.c_char * size).from_buffer(self._memory, at)

    def _release_record(self, entry: list[int]) -> None:
        entry[1] = 1
        if self._held and self._held[0] is entry and not self._unread_records:
            self._credit()

    def _credit(self) -> None:
        """Report to the writer that it may reuse all space up to the first record that is not
        released."""
        credited = self._released_until
        while self._held and self._held[0][1]:
            credited = self._released_until = self._held.popleft()[0]
        if credited != self._credited and self._loop is not None:
            os.eventfd_write(self._end.space, credited - self._credited)
            self._credited = credited

    def close(self) -> None:
        """Stop delivering, and release the memory and the descriptors.

        The memory stays mapped as long as a view of it exists.
        """
        if self._loop is not None:
            self._loop.remove_reader(self._end.items)
            self._loop = None
        self._memory, self._view = None, memoryview(b"")
        _close_all(self._end.descriptors)


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
