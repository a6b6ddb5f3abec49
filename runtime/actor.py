"""Actors: each has one mailbox and one state, and handles one message at a time.

A handler is a plain function that changes the actor's state and sends messages. It cannot await, so
it never blocks on a reply or on space in a ring, and no cycle of messages can deadlock.
Long-running work belongs on a thread that the actor owns, which hands its result back with
`Context.call_soon`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from nanoactor.runtime.alarm import Alarm
from nanoactor.runtime.codec import copy_arrays
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.lease import Lease
from nanoactor.runtime.outbox import Outbox
from nanoactor.runtime.tracing import Track

M = TypeVar("M")


class Recreate(enum.Enum):
    """Result of `Actor.reset` if the actor keeps no state and must be created anew."""

    RECREATE = enum.auto()


RECREATE = Recreate.RECREATE
Handler = Callable[[Any], None]
ReadyInfo = object
"""Record that an actor publishes to all other actors once it is ready: a picklable object, or None.
The runtime passes it on without interpreting it."""
Progress = tuple[int, float] | tuple[int, float, bool]
"""A number that changes with each completed piece of work, the seconds that the current piece may
take, and optionally whether it runs on this process's own CPU, in which case CPU time distinguishes
work from a hang."""


class Context:
    """Services that the node provides to an actor: outboxes, the event loop, a logger."""

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
        """Track that this actor's spans are recorded on."""
        self.tracks = [self.track]
        self._outboxes = outboxes
        self._fail = fail
        self.retired = False
        """True if the system was cut, after which pending calls are dropped."""
        self._lease: Lease | None = None
        self.alarm: Alarm | None = None
        """The node's alarm; None if the node neither wakes other nodes early nor is woken early."""
        self.send_self: Callable[[Any], None] = lambda message: None
        """Function that puts one of the actor's own messages into its mailbox. It is a no-op in a
        replay, which delivers these messages itself."""

    def outbox(self, edge: str) -> Outbox:
        """Return the outbox of one of this actor's edges, by the name of the target or of the
        edge."""
        try:
            return self._outboxes[edge]
        except KeyError:
            raise RuntimeFault(
                f"actor {self.name} has no edge {edge!r}; its edges are {sorted(self._outboxes)}"
            ) from None

    def wake_others(self) -> None:
        """Wake the other nodes because work is on its way to them. May be called from any
        thread."""
        if self.alarm is not None:
            self.alarm.wake_others()

    def allow_sleep(self) -> None:
        """Allow this node's loop to sleep again: the message that it was woken for has arrived."""
        if self.alarm is not None:
            self.alarm.allow_sleep()

    def new_track(self, name: str) -> Track:
        """Return a new timeline row for a device or thread that works on the actor's behalf."""
        track = Track(f"{self.name} {name}")
        self.tracks.append(track)
        return track

    def now(self) -> float:
        """Return the time in seconds on the host's monotonic clock; simulations override this."""
        return time.monotonic()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the actor's loop. May be called from any thread; an exception ends the
        node."""
        self.loop.call_soon_threadsafe(self._run_guarded, function, arguments)

    def call_later(self, seconds: float, function: Callable[..., None]) -> asyncio.TimerHandle:
        """Run a function on the actor's loop after a delay. Must be called on the loop."""
        return self.loop.call_later(seconds, self._run_guarded, function, ())

    def send_self_later(self, seconds: float, message: Any) -> None:
        """Send a message to the actor itself after a delay: a timer that a recording can replay.
        Must be called on the loop."""
        self.call_later(seconds, lambda: self.send_self(message))

    def retire(self) -> None:
        """Mark the system as cut: pending calls are dropped."""
        self.retired = True
        self.alarm = None
        self.send_self = lambda message: None

    def _run_guarded(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.retired:
            return
        try:
            function(*arguments)
        except BaseException as error:
            self._fail(error)

    def fail(self, error: BaseException) -> None:
        """End the node because of an error. Must be called on the loop's thread."""
        self._fail(error)

    def set_lease(self, lease: Lease) -> None:
        """Set the lease under which the next message is read. Called only by the mailbox."""
        self._lease = lease

    def owned_copy(self, message: M) -> M:
        """Return the current message, with its arrays copied if they are read in place."""
        return message if self._lease is None else copy_arrays(message)

    def hold_lease(self) -> Lease | None:
        """Return the lease that keeps the current message readable after its handler returns, or
        None if the message owns its memory.

        The caller must release the lease, on the loop. Call this only while a message is being
        handled.
        """
        lease, self._lease = self._lease, None
        return lease


class Actor:
    """Base class of all actors. An actor is created in its node's process, from its configuration
    only."""

    context: Context

    def __init__(self, config: Any) -> None:
        """`config` is the actor's configuration from the topology (`ActorSpec.config`)."""

    def setup(self) -> ReadyInfo:
        """Set up the actor, however long it takes, before it receives any message; return the
        record that it publishes to the other actors.

        `System.start` raises an exception from here in the caller if its class sets `picklable =
        True`.
        """
        return None

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Store the context. `ready` holds the record that each actor published; all actors are
        ready by now."""
        self.context = context

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method that handles each message class."""
        return {}

    def span_names(self) -> Mapping[type, str]:
        """Return the names of spans in traces, by message class; the default is the name of the
        class."""
        return {}

    def before_trace(self) -> None:
        """Record the spans of unfinished work; called just before a trace is taken."""

    def on_ready(self, outbox: Outbox) -> None:
        """Handle an outbox that was not ready, or had queued messages, and is ready now."""

    def progress(self) -> Progress | None:
        """Return the progress of the current work, for the watchdog; None if there is no work."""
        return None

    def may_stay_awake(self) -> bool:
        """Return True if the loop, once woken, may poll for messages instead of sleeping; return
        False while the actor's own threads need the interpreter."""
        return True

    def expects_death(self) -> bool:
        """Return True if a node's death is expected because the cause of earlier deaths is being
        searched for; an expected death is charged to a separate budget. Called only on actors in
        the user's process."""
        return False

    def rehearse(self) -> Iterator[object]:
        """Run the code that an upcoming message will need on a stand-in for the actor's state, and
        yield after each part so that the loop can poll for messages. Called when the node was woken
        ahead of work."""
        return iter(())

    def reset(self) -> ReadyInfo | Recreate:
        """Reset the actor after a cut, in which all actors restart and earlier messages that were
        not handled are lost. Discard all work, keep expensive state (a model, a tokenizer), and
        return the record that the actor publishes. Work running elsewhere must have finished when
        this returns. `start` follows, with a new context. By default, a new actor is created
        instead."""
        return RECREATE

    def stop(self) -> None:
        """Stop threads and release resources that process exit does not free. Called when the
        system shuts down or a new actor replaces this one."""

    def statistics(self) -> dict[str, Any]:
        """Return the actor's own statistics, for `System.statistics()`."""
        return {}
