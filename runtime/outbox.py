"""The sending end of an edge, where messages wait for room so that no handler has to."""

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
    """The sending side of an edge, with the same interface for a ring, a queue and a target in the
    same node."""

    label: str

    def send(self, message: Any) -> None:
        """Send a message now, or queue it until there is room; never blocks.

        The message and its arrays must not be changed afterwards. Raises `RecordTooLarge` if the
        message is too large for the edge, `OutboxOverflow` if more messages are queued than the
        edge's bound allows, and `PeerBroken` after the other side has died.
        """

    @property
    def ready(self) -> bool:
        """Return True if a message would be sent at once and, on a paced edge, neither the reader
        nor the actor itself lags. An actor that can merge messages holds them until then. After a
        result of False, `Actor.on_ready` is called once the outbox is ready, so the actor should
        ask only when it has something to send."""

    def statistics(self) -> dict[str, int]:
        """Return the numbers of messages, bytes and waits, the current depth, and the highest
        depth."""


class RemoteOutbox:
    """An outbox on top of a transport."""

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
        """`fatal` is called with errors raised outside of `send`, where no caller could catch
        them."""
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
        """By message class: the kind of its spans, and the function that reads the number that
        links them."""
        self._queued: deque[tuple[Encoded, int, int, int]] = deque()
        """Queued messages: (message, kind, number and begin of its span)."""
        self._high_water = 0
        self._broken = ""

    def set_inputs(self, inputs: list[Receiver]) -> None:
        """Set the receivers of the same actor: a paced outbox is not ready while they have a
        backlog."""
        self._inputs = inputs

    def send(self, message: Any) -> None:
        """Write the message, or queue it if there is no room or other messages are queued."""
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
        """Return True if nothing is queued and, on a paced edge, every record was read and no
        further message has arrived for the actor."""
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
        """Drop queued messages; later sends raise `PeerBroken`."""
        self._broken = reason
        self._queued.clear()

    def close(self) -> None:
        """Drop queued messages and close the transport's end."""
        self.mark_broken("the system is closed")
        self._sender.close()

    def statistics(self) -> dict[str, int]:
        """Return the numbers of messages, bytes and waits, the current depth, and the highest
        depth."""
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
    """An outbox to actors of the same node; messages are passed by reference."""

    ready = True

    def __init__(self, label: str, puts: list[Callable[[Any], None]]) -> None:
        self.label = label
        self._puts = puts
        self._statistics = EdgeStatistics()

    def send(self, message: Any) -> None:
        """Put the message into every target's mailbox."""
        self._statistics.messages += 1
        for put in self._puts:
            put(message)

    def statistics(self) -> dict[str, int]:
        """Return the number of messages sent; the mailbox counts queued messages."""
        return _as_dict(self._statistics, 0, 0)
