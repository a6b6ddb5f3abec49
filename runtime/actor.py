"""An actor: one mailbox, one state, one message handled at a time.

A handler is a plain function: it changes the actor's state and sends. It cannot await, so it can
wait neither for a reply nor for room in a ring, and no cycle of messages can deadlock. Long work
belongs on a thread of the actor's own, which hands its result back with `Context.call_soon`.
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
    """Result of `Actor.renew` for an actor that keeps nothing."""

    FRESH = enum.auto()


FRESH = Fresh.FRESH
Handler = Callable[[Any], None]
ReadyInfo = object
"""Record that an actor publishes to all others once it is ready: picklable, or None. The runtime
only carries it."""
Progress = tuple[int, float] | tuple[int, float, bool]
"""A number that changes with each completed piece of work, the seconds that the current piece may
take, and whether it runs on this process's own CPU, in which case CPU time distinguishes work from
a hang."""


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
        """Track that receives this actor's spans."""
        self.tracks = [self.track]
        self._outboxes = outboxes
        self._fail = fail
        self.retired = False
        """True once the system was cut: pending calls are then dropped."""
        self._lease: Lease | None = None
        self.alarm: Alarm | None = None
        """Alarm of the node, if its loop stays awake for messages on their way."""
        self.remind: Callable[[Any], None] = lambda message: None
        """Puts one of the actor's own messages into its mailbox; a no-op in a replay, which
        delivers them itself."""

    def outbox(self, edge: str) -> Outbox:
        """Return the outbox of one of this actor's edges, by the target's or the edge's name."""
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
        """Return a new timeline row for a device or thread that works on the actor's behalf."""
        track = Track(f"{self.name} {name}")
        self.tracks.append(track)
        return track

    def now(self) -> float:
        """Return seconds on the host's monotonic clock; a simulation has its own."""
        return time.monotonic()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the actor's loop, from any thread; an exception ends the node."""
        self.loop.call_soon_threadsafe(self._guarded, function, arguments)

    def call_later(self, seconds: float, function: Callable[..., None]) -> asyncio.TimerHandle:
        """Run a function on the actor's loop after a while; call this on the loop."""
        return self.loop.call_later(seconds, self._guarded, function, ())

    def tell_later(self, seconds: float, message: Any) -> None:
        """Send the actor itself a message after a delay: a timer that a recording can replay. Call
        this on the loop."""
        self.call_later(seconds, lambda: self.remind(message))

    def retire(self) -> None:
        """Mark the system as cut: pending calls are dropped."""
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
        """Return the current message, with arrays of its own if they are being read in place."""
        return message if self._lease is None else copied(message)

    def hold(self) -> Lease | None:
        """Keep the current message readable beyond its handler; return None if it owns its memory.

        The caller must release the lease, on the loop. Called only while a message is handled.
        """
        lease, self._lease = self._lease, None
        return lease


class Actor:
    """Base of all actors; created in its node's process, with its configuration and nothing
    else."""

    context: Context

    def __init__(self, config: Any) -> None:
        """`config` is the actor's entry in the topology."""

    def setup(self) -> ReadyInfo:
        """Get ready, however long it takes; runs before any message. Return what others need.

        An exception here is raised in the caller if its class says `picklable = True`.
        """
        return None

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Take the context, and the record that each actor published when it was ready: by now all
        are."""
        self.context = context

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method that handles each message class."""
        return {}

    def span_names(self) -> Mapping[type, str]:
        """Name spans in traces, by message class, if the name is not the class's."""
        return {}

    def before_trace(self) -> None:
        """Add the spans of unfinished work: a trace is about to be taken."""

    def on_ready(self, outbox: Outbox) -> None:
        """Handle an outbox that was not ready, or had to wait, and is ready now."""

    def progress(self) -> Progress | None:
        """Report the progress of the current work to the watchdog; None if there is none."""
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
        """Run code that a message on its way will need, on doubles of the actor's state, one part
        at a time; between two parts the loop looks for messages. Called when the node was
        roused."""
        return iter(())

    def renew(self) -> ReadyInfo | Fresh:
        """Reset the actor after a cut: no message sent before it arrives any more, and all actors
        restart. Forget all work, keep expensive state (a model, a tokenizer), and return what
        others need; work running elsewhere must be finished when this returns. `start` follows,
        with another context. By default a new actor is created instead."""
        return FRESH

    def stop(self) -> None:
        """Stop threads and release what process exit does not free; called when the system shuts
        down."""

    def statistics(self) -> dict[str, Any]:
        """Return the actor's own figures, for `System.statistics()`."""
        return {}
