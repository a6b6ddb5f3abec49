"""Where messages reach an actor: from neighbours by reference, from other nodes in place."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nanoactor.runtime.actor import Context, Handler
from nanoactor.runtime.codec import copied
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.transport import Deliver

# How many local messages are handled before the loop looks at its descriptors again.
_BATCH = 64


class Mailbox:
    """One actor's inbox; calls one handler at a time."""

    def __init__(
        self,
        context: Context,
        handlers: Mapping[type, Handler],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._handlers = dict(handlers)
        self._fatal = fatal
        self._local: deque[tuple[int, Any]] = deque()
        self._scheduled = False
        self._handled = 0
        self._high_water = 0
        self._waiting_ns = 0

    def put(self, message: Any) -> None:
        """A neighbour's message: handled soon, never inside the sender's handler."""
        self._local.append((time.monotonic_ns(), message))
        self._high_water = max(self._high_water, len(self._local))
        if not self._scheduled:
            self._scheduled = True
            self._context.loop.call_soon(self._drain)

    def _drain(self) -> None:
        try:
            for _ in range(min(_BATCH, len(self._local))):
                put_at, message = self._local.popleft()
                self._waiting_ns += time.monotonic_ns() - put_at
                self._handle(message)
            self._scheduled = bool(self._local)
            if self._scheduled:
                self._context.loop.call_soon(self._drain)
        except BaseException as error:
            self._fatal(error)

    def deliver(self, message: Any, lease: Lease | None) -> bool:
        """A message from another node, read in place. True where the handler keeps the lease."""
        if lease is None:
            self._handle(message)
            return False
        self._context.enter(lease)
        self._handle(message)
        return self._context.hold() is None

    def _handle(self, message: Any) -> None:
        self._handled += 1
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RuntimeFault(f"actor {self._context.name} takes no {type(message).__name__}")
        handler(message)

    def statistics(self) -> dict[str, int]:
        """Messages handled; of the local ones the depth, the highest depth, the time waited."""
        return {
            "handled": self._handled,
            "depth": len(self._local),
            "high_water": self._high_water,
            "waiting_ns": self._waiting_ns,
        }


class DelayedDelivery:
    """Delivers each message a random while later, in order: what tests put on every edge."""

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
        self._waiting: deque[tuple[float, Any]] = deque()

    def __call__(self, message: Any, lease: Lease | None = None) -> bool:
        """Take a message; what it reads in place is copied, as it outlives its record."""
        if lease is not None:
            message = copied(message)
        due = self._loop.time() + self._random.random() ** 3 * self._seconds
        self._waiting.append((due, message))
        if len(self._waiting) == 1:
            self._loop.call_at(due, self._release)
        return False

    def _release(self) -> None:
        try:
            _, message = self._waiting.popleft()
            self._deliver(message, None)
        except BaseException as error:
            self._fatal(error)
            return
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._release)
