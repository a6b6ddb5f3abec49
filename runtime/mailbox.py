"""Mailboxes, which receive an actor's messages and call its handlers.

Messages from actors of the same node (process) are passed by reference. Messages from other nodes
are read in place in a ring in shared memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.runtime.actor import Context, Handler
from nanoactor.runtime.codec import copy_arrays, linked_by
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.tracing import Track
from nanoactor.runtime.transport import Deliver

# Number of local messages that are handled before the loop polls its descriptors again.
_BATCH = 64


class Mailbox:
    """Inbox of one actor. It calls the handler of one message at a time."""

    def __init__(
        self,
        context: Context,
        handlers: Mapping[type, Handler],
        fatal: Callable[[BaseException], None],
        span_names: Mapping[type, str],
    ) -> None:
        """`fatal` is called with an exception that a handler raises. `span_names` maps message
        classes to the names of their spans in traces; the default is the class name."""
        self._context = context
        self._handlers = dict(handlers)
        self._fatal = fatal
        self._span_names = span_names
        self._local: deque[tuple[int, Port, Any]] = deque()
        self._scheduled = False
        self._handled = 0
        self._high_water = 0
        self._waiting_ns = 0

    def port(self, source: str) -> Port:
        """Return the port through which messages from the actor named `source` enter."""
        return Port(self, self._context.track, source)

    def put(self, port: Port, message: Any) -> None:
        """Queue a message from an actor of the same process. Its handler runs from the loop, never
        inside the sender's handler."""
        self._local.append((time.monotonic_ns(), port, message))
        self._high_water = max(self._high_water, len(self._local))
        if not self._scheduled:
            self._scheduled = True
            self._context.loop.call_soon(self._drain)

    def _drain(self) -> None:
        try:
            for _ in range(min(_BATCH, len(self._local))):
                put_at, port, message = self._local.popleft()
                self._waiting_ns += time.monotonic_ns() - put_at
                self.handle(port, message, put_at)
            self._scheduled = bool(self._local)
            if self._scheduled:
                self._context.loop.call_soon(self._drain)
        except BaseException as error:
            self._fatal(error)

    def deliver(self, port: Port, message: Any, lease: Lease | None, sent: int) -> bool:
        """Handle a message from another node (process) at once. `lease` is the permission to read
        the message in place, or None if the message owns its memory. `sent` is the send time in ns.
        Return True if the handler keeps the lease."""
        if lease is None:
            self.handle(port, message, sent)
            return False
        self._context.set_lease(lease)
        self.handle(port, message, sent)
        return self._context.hold_lease() is None

    def handle(self, port: Port, message: Any, sent: int) -> None:
        """Call the message's handler and record its span. Raises `RuntimeFault` if the actor has no
        handler for its class."""
        if self._context.retired:  # the system was cut: the receiver's state is gone
            return
        self._handled += 1
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RuntimeFault(
                f"actor {self._context.name} does not handle {type(message).__name__}"
            )
        begin = time.monotonic_ns()
        number = port.number_of(message)  # now, as the handler may release its memory
        handler(message)
        self._context.track.add(
            port.kind_of(type(message)), number, begin, time.monotonic_ns(), sent
        )

    def span_name(self, cls: type) -> str:
        """Return the name under which traces show the handling of this message class."""
        return self._span_names.get(cls, cls.__name__)

    def statistics(self) -> dict[str, int]:
        """Return the number of messages handled and, for local messages, the current and the
        highest queue depth and the total waiting time in ns."""
        return {
            "handled": self._handled,
            "depth": len(self._local),
            "high_water": self._high_water,
            "waiting_ns": self._waiting_ns,
        }


class Port:
    """Receiving end of a mailbox for the messages of one sender. Each sender has its own port, so
    that traces can name the sender."""

    def __init__(self, mailbox: Mailbox, track: Track, source: str) -> None:
        self._mailbox = mailbox
        self._track = track
        self._source = source
        self._kinds: dict[type, tuple[int, Callable[[Any], int]]] = {}

    def put(self, message: Any) -> None:
        """Queue a message from an actor of the same node."""
        self._mailbox.put(self, message)

    def deliver(self, message: Any, lease: Lease | None, sent: int) -> bool:
        """Handle a message from another node (process). Return True if the handler keeps `lease`,
        the permission to read the message in place."""
        return self._mailbox.deliver(self, message, lease, sent)

    def kind_of(self, cls: type) -> int:
        """Return the number of the span kind that traces use for messages of this class from this
        sender."""
        return self._kind_and_reader(cls)[0]

    def number_of(self, message: Any) -> int:
        """Return the number that links the message's span to other spans; 0 if its class defines
        none."""
        return self._kind_and_reader(type(message))[1](message)

    def _kind_and_reader(self, cls: type) -> tuple[int, Callable[[Any], int]]:
        known = self._kinds.get(cls)
        if known is None:
            by, read_number = linked_by(cls)
            kind = self._track.kind(self._mailbox.span_name(cls), by, self._source)
            known = self._kinds[cls] = kind, read_number
        return known


class DelayedDelivery:
    """A `deliver` function that delays each message by a random time without changing the order.
    Tests put it at the end of every channel."""

    def __init__(
        self,
        deliver: Deliver,
        loop: asyncio.AbstractEventLoop,
        fatal: Callable[[BaseException], None],
        milliseconds: float,
        seed: str,
    ) -> None:
        self._deliver = deliver
        self._loop = loop
        self._fatal = fatal
        self._seconds = milliseconds / 1000
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, Any, int]] = deque()

    def __call__(self, message: Any, lease: Lease | None, sent: int) -> bool:
        """Queue a message for delayed delivery. Arrays that are read in place are copied, so that
        no lease is kept, and the result is always False."""
        if lease is not None:
            message = copy_arrays(message)
        due = self._loop.time() + self._random.random() ** 3 * self._seconds
        self._waiting.append((due, message, sent))
        if len(self._waiting) == 1:
            self._loop.call_at(due, self._release)
        return False

    def _release(self) -> None:
        try:
            _, message, sent = self._waiting.popleft()
            self._deliver(message, None, sent)
        except BaseException as error:
            self._fatal(error)
            return
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._release)
