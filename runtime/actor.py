"""An actor: one mailbox, one state, one message handled at a time.

A handler is a plain function: it changes the actor's state and sends. It cannot await, so
it can wait neither for a reply nor for room in a ring, and no cycle of messages can
deadlock. Work that takes long belongs on a thread of the actor's own, which hands its
result back with `Context.call_soon`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from nanoactor.runtime.alarm import Alarm
from nanoactor.runtime.codec import copied
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.outbox import Outbox
from nanoactor.runtime.tracing import Track

M = TypeVar("M")


class Fresh(enum.Enum):
    """The answer of an actor that keeps nothing."""

    FRESH = enum.auto()


FRESH = Fresh.FRESH
Handler = Callable[[Any], None]
ReadyInfo = object
"""What an actor tells all others when it is ready: a picklable record, or None. The runtime only
carries it."""
Progress = tuple[int, float] | tuple[int, float, bool]
"""A number that changes with each piece of work done, the seconds that the piece at hand may take,
and whether this process's own processor does it, whose time then tells work from a hang."""


class Context:
    """The node's services for an actor: its outboxes, its loop, its logger."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        outboxes: Mapping[str, Outbox],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self.loop = loop
        self.log = logging.getLogger(f"nanoactor.{name}")
        self.track = Track(name)
        """Where the spans of this actor go."""
        self.tracks = [self.track]
        self._outboxes = outboxes
        self._fail = fail
        self.retired = False
        """Whether the system was cut since: what is under way comes to nothing."""
        self._lease: Lease | None = None
        self.alarm: Alarm | None = None
        """Of the node, where loops stay awake for what is on its way."""
        self.remind: Callable[[Any], None] = lambda message: None
        """Puts a message of the actor's own into its mailbox; in a replay, which brings them
        itself, it does nothing."""

    def outbox(self, edge: str) -> Outbox:
        """The outbox of one of this actor's edges, by the target's or the edge's name."""
        try:
            return self._outboxes[edge]
        except KeyError:
            raise RuntimeFault(
                f"actor {self.name} has no edge {edge!r}; it has {sorted(self._outboxes)}"
            ) from None

    def rouse(self) -> None:
        """Wake the other nodes, as work is on its way to them; from any thread."""
        if self.alarm is not None:
            self.alarm.rouse()

    def rest(self) -> None:
        """Allow this node's loop to sleep again: the message that it was woken for has arrived."""
        if self.alarm is not None:
            self.alarm.rest()

    def new_track(self, name: str) -> Track:
        """A row of the timeline for what works on the actor's behalf: a device, a thread."""
        track = Track(f"{self.name} {name}")
        self.tracks.append(track)
        return track

    def now(self) -> float:
        """Seconds on the host's monotonic clock; a simulation has its own."""
        return time.monotonic()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the actor's loop, from any thread; an exception ends the node."""
        self.loop.call_soon_threadsafe(self._guarded, function, arguments)

    def call_later(self, seconds: float, function: Callable[..., None]) -> asyncio.TimerHandle:
        """Run a function on the actor's loop after a while; call this on the loop."""
        return self.loop.call_later(seconds, self._guarded, function, ())

    def tell_later(self, seconds: float, message: Any) -> None:
        """Send the actor itself a message after a while: a clock that a recording replays. Call
        this on the loop."""
        self.call_later(seconds, lambda: self.remind(message))

    def retire(self) -> None:
        """The system was cut: calls that are under way come to nothing."""
        self.retired = True
        self.alarm = None
        self.remind = lambda message: None

    def _guarded(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.retired:
            return
        try:
            function(*arguments)
        except BaseException as error:
            self._fail(error)

    def fail(self, error: BaseException) -> None:
        """End the node because of an error, from the loop's thread."""
        self._fail(error)

    def enter(self, lease: Lease) -> None:
        """For the mailbox: the message about to be handled is read under this lease."""
        self._lease = lease

    def own(self, message: M) -> M:
        """The message at hand, with arrays of its own if they are being read in place."""
        return message if self._lease is None else copied(message)

    def hold(self) -> Lease | None:
        """Keep the message at hand readable beyond its handler; None where it owns its memory.

        The caller must release the lease, on the loop. Called only while a message is handled.
        """
        lease, self._lease = self._lease, None
        return lease


class Actor:
    """Base of all actors; made where it runs, with its configuration and nothing else."""

    context: Context

    def __init__(self, config: Any) -> None:
        """`config` is what the topology holds for this actor."""

    def setup(self) -> ReadyInfo:
        """Get ready, as long as it takes; runs before any message. Return what others need.

        An exception here becomes the caller's, if its class says `picklable = True`.
        """
        return None

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Take the context, and what every actor told when it was ready: by now all are."""
        self.context = context

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method that handles each message class."""
        return {}

    def span_names(self) -> Mapping[type, str]:
        """Name spans in traces, by message class, where the name is not the class's."""
        return {}

    def before_trace(self) -> None:
        """A trace is about to be taken: add the spans of what has begun and not ended."""

    def on_ready(self, outbox: Outbox) -> None:
        """An outbox that was not ready, or had to wait, is ready now."""

    def progress(self) -> Progress | None:
        """Tell the watchdog how far the work at hand is; None where there is none."""
        return None

    def may_stay_awake(self) -> bool:
        """Return True if the loop, once woken, may poll for messages instead of sleeping: not while
        the actor's own threads need the interpreter."""
        return True

    def expects_death(self) -> bool:
        """Return True if a death is expected because its cause is being searched for; it is charged
        to a separate budget. Called on actors in the user's process."""
        return False

    def rehearse(self) -> Iterator[object]:
        """Run code that a message on its way will need, on doubles of the actor's state, a part at
        a time; between two parts the loop looks for messages. Called where the node was roused."""
        return iter(())

    def renew(self) -> ReadyInfo | Fresh:
        """The system was cut: nothing that was sent before arrives any more, and everybody begins
        anew. Forget all work, keep what is dear (a model, a tokenizer), and return what others
        need; work that is under way elsewhere must be over when this returns. `start` follows,
        with another context. The default has a new actor made instead."""
        return FRESH

    def stop(self) -> None:
        """The system ends: stop threads, let go of what the process's end does not free."""

    def statistics(self) -> dict[str, Any]:
        """Figures of the actor's own, for `System.statistics()`."""
        return {}
