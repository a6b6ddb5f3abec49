"""Outboxes, the sending ends of edges (one-way channels between actors). Messages wait here for
room, so that no handler has to wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from nanoactor.runtime.codec import Encoded, encode, linked_by
from nanoactor.runtime.errors import OutboxOverflow, PeerBroken, RecordTooLarge
from nanoactor.runtime.tracing import Track
from nanoactor.runtime.transport import EdgeStatistics, Fatal, Receiver, Sender


class Outbox(Protocol):
    """The sending end of an edge, a one-way channel to one or more actors. The interface does not
    depend on whether messages go through a ring, a queue, or are passed by reference."""

    label: str

    def send(self, message: Any) -> None:
        """Send a message now, or queue it until there is room; never blocks.

        The caller must not change the message or its arrays afterwards. Raises `RecordTooLarge` if
        the message is too large for the edge, `OutboxOverflow` if more messages are queued than the
        edge's bound allows, and `PeerBroken` after the receiving node has died.
        """

    @property
    def ready(self) -> bool:
        """True if a message would be sent at once. On an edge declared as paced, the readers must
        also have read every message, and the sending actor must have no unread messages.

        An actor that can merge messages keeps them until the outbox is ready. Once this property
        has returned False, `Actor.on_ready` is called when the outbox becomes ready, so the actor
        should read it only when it has something to send.
        """

    def statistics(self) -> dict[str, int]:
        """Return the numbers of sent messages and bytes, the number of sends that found no room
        (`waits`), and the current and the highest queue depth."""


class RemoteOutbox:
    """Sending end of a channel to actors in other processes, on top of a transport."""

    def __init__(
        self,
        label: str,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        bound: int | None,
        on_ready: Callable[[Outbox], None],
        fatal: Fatal,
        track: Track,
        paced: bool = False,
    ) -> None:
        """`bound` is the maximum number of queued messages (None: unlimited). `fatal` is called
        with errors that are raised outside of `send`, where no caller could catch them."""
        self.label = label
        self._sender = sender
        self._loop = loop
        self._bound = bound
        self._on_ready = on_ready
        self._fatal = fatal
        self._paced = paced
        self._inputs: list[Receiver] = []
        self._track = track
        self._kinds: dict[type, tuple[int, Callable[[Any], int]]] = {}
        """By message class: the number of its span kind, and a function that reads the number with
        which traces link a message's spans."""
        self._queued: deque[tuple[Encoded, int, int, int]] = deque()
        """Queued messages, each with the properties of its span: (encoded message, number of the
        span kind, linking number, begin in ns)."""
        self._high_water = 0
        self._broken = ""

    def set_inputs(self, inputs: list[Receiver]) -> None:
        """Set the receivers of the actor that owns this outbox. A paced outbox is not ready while
        any of them has a backlog."""
        self._inputs = inputs

    def send(self, message: Any) -> None:
        """Write the message, or queue it if there is no room or if other messages are queued
        already."""
        if self._broken:
            raise PeerBroken(f"{self.label}: {self._broken}")
        begin = time.monotonic_ns()
        encoded = encode(message, self._sender.inline)
        if encoded.nbytes > self._sender.max_record:
            raise RecordTooLarge(
                f"{self.label}: {type(message).__name__} takes {encoded.nbytes} bytes, but the "
                f"limit of the edge is {self._sender.max_record}, half of its capacity"
            )
        kind, number_of = self._kinds.get(type(message)) or self._kind_of(type(message))
        number = number_of(message)
        if not self._queued:
            if self._sender.try_send(encoded):
                self._track.add(kind, number, begin, self._sender.sent_ns)
                return
            self._sender.when_writable(self._loop, self._flush)
        # Arrays of a queued message may be views of a record that is read in place: copy them.
        arrays = [array.copy() for array in encoded.arrays]
        copy = Encoded(encoded.meta, arrays, encoded.nbytes)
        self._queued.append((copy, kind, number, begin))
        depth = len(self._queued)
        self._high_water = max(self._high_water, depth)
        if self._bound is not None and depth > self._bound:
            raise OutboxOverflow(
                f"{self.label}: {depth} messages are waiting, but the bound is {self._bound}"
            )

    def _kind_of(self, cls: type) -> tuple[int, Callable[[Any], int]]:
        by, number = linked_by(cls)
        self._kinds[cls] = self._track.kind(f"send {cls.__name__}", by), number
        return self._kinds[cls]

    @property
    def ready(self) -> bool:
        """True if no message is queued. If the outbox is paced, its readers must also have read
        every record, and its actor must have no unread messages."""
        if self._queued:
            return False
        return not self._paced or bool(self._broken) or self._has_caught_up()

    def _has_caught_up(self) -> bool:
        for receiver in self._inputs:
            if receiver.backlog:
                receiver.when_drained(self._flush)
                return False
        if self._sender.has_unread():
            self._sender.when_writable(self._loop, self._flush)
            return False
        return True

    def _flush(self) -> None:
        try:
            while self._queued:
                encoded, kind, number, begin = self._queued[0]
                if not self._sender.try_send(encoded):
                    self._sender.when_writable(self._loop, self._flush)
                    return
                self._queued.popleft()
                self._track.add(kind, number, begin, self._sender.sent_ns)
            self._on_ready(self)
        except BaseException as error:
            self._fatal(error)

    def mark_broken(self, reason: str) -> None:
        """Drop queued messages. Later sends raise `PeerBroken` with this reason."""
        self._broken = reason
        self._queued.clear()

    def close(self) -> None:
        """Drop queued messages and close the writing end of the transport."""
        self.mark_broken("the system is closed")
        self._sender.close()

    def statistics(self) -> dict[str, int]:
        """Return the numbers of sent messages and bytes, the number of sends that found no room
        (`waits`), and the current and the highest queue depth."""
        return _as_dict(self._sender.statistics, len(self._queued), self._high_water)


def _as_dict(statistics: EdgeStatistics, depth: int, high_water: int) -> dict[str, int]:
    return {
        "messages": statistics.messages,
        "bytes": statistics.bytes,
        "waits": statistics.waits,
        "depth": depth,
        "high_water": high_water,
    }


class LocalOutbox:
    """Sending end of a channel to actors in the same process. Messages are passed by reference."""

    ready = True

    def __init__(self, label: str, puts: list[Callable[[Any], None]]) -> None:
        self.label = label
        self._puts = puts
        self._statistics = EdgeStatistics()

    def send(self, message: Any) -> None:
        """Put the message into the mailbox of every target."""
        self._statistics.messages += 1
        for put in self._puts:
            put(message)

    def statistics(self) -> dict[str, int]:
        """Return the number of messages sent; the other counters are 0, because messages queue in
        the target's mailbox."""
        return _as_dict(self._statistics, 0, 0)
