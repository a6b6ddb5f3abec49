"""The base class of actors, and the context through which an actor uses the runtime.

An actor has one mailbox and one state, and handles one message at a time. A handler is a plain
function that changes the actor's state and sends messages. It cannot await, so it never blocks on a
reply or on space in a channel, and no cycle of messages can deadlock. Long-running work belongs on
a thread that the actor owns. The thread hands its result back with `Context.call_soon`.
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
    """Type of `RECREATE`, which `Actor.reset` returns if the actor must be created anew."""

    RECREATE = enum.auto()


RECREATE = Recreate.RECREATE
Handler = Callable[[Any], None]
ReadyInfo = object
"""Record that an actor publishes to all other actors once it is ready: any picklable object, or
None. The runtime does not interpret it."""
Progress = tuple[int, float] | tuple[int, float, bool]
"""(counter, seconds, on own CPU): a number that changes with each completed piece of work, the time
that the current piece may take, and optionally whether that piece runs on this process's own CPU.
If it does, its CPU time tells work from a hang."""


class Context:
    """Services that a node (a process that runs actors) provides to one of its actors: outboxes,
    the event loop, timers, a logger, and a track (timeline row) for trace spans."""

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
        """Timeline row on which this actor's spans are recorded."""
        self.tracks = [self.track]
        self._outboxes = outboxes
        self._fail = fail
        self.retired = False
        """True once the system was cut (all actors restart after a node's death). Pending calls are
        then dropped."""
        self._lease: Lease | None = None
        self.alarm: Alarm | None = None
        """The node's alarm, which wakes other nodes ahead of work; None if the node takes no part
        in parallel wake-ups."""
        self.send_self: Callable[[Any], None] = lambda message: None
        """Function that puts one of the actor's own messages into its mailbox. In a replay it does
        nothing, because the recording contains these messages."""

    def outbox(self, edge: str) -> Outbox:
        """Return the outbox of one of this actor's outgoing edges (one-way channels).

        `edge` is the label: the name of the edge or of its target. Raises `RuntimeFault` if there
        is no such edge.
        """
        try:
            return self._outboxes[edge]
        except KeyError:
            raise RuntimeFault(
                f"actor {self.name} has no edge {edge!r}; its edges are {sorted(self._outboxes)}"
            ) from None

    def wake_others(self) -> None:
        """Wake the other nodes (processes), because a message will reach them soon. May be called
        from any thread."""
        if self.alarm is not None:
            self.alarm.wake_others()

    def allow_sleep(self) -> None:
        """Allow this node's event loop to sleep again, because the message for which it was woken
        has arrived."""
        if self.alarm is not None:
            self.alarm.allow_sleep()

    def new_track(self, name: str) -> Track:
        """Return a new track, the timeline row of a device or thread that works for the actor."""
        track = Track(f"{self.name} {name}")
        self.tracks.append(track)
        return track

    def now(self) -> float:
        """Return the time in seconds on the host's monotonic clock; simulations override this."""
        return time.monotonic()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule a function on the actor's loop. May be called from any thread. An exception in
        the function ends the node (this process)."""
        self.loop.call_soon_threadsafe(self._run_guarded, function, arguments)

    def call_later(self, seconds: float, function: Callable[..., None]) -> asyncio.TimerHandle:
        """Schedule a function on the actor's loop after a delay. Must be called on the loop. The
        returned handle can cancel the call."""
        return self.loop.call_later(seconds, self._run_guarded, function, ())

    def send_self_later(self, seconds: float, message: Any) -> None:
        """Put a message into the actor's own mailbox after a delay. Unlike `call_later`, such a
        timer can be replayed from a recording. Must be called on the loop."""
        self.call_later(seconds, lambda: self.send_self(message))

    def retire(self) -> None:
        """Mark the context as unusable after a cut (a restart of all actors). Pending calls are
        dropped."""
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
        """End the node (this process) because of an error. Must be called on the loop's thread."""
        self._fail(error)

    def set_lease(self, lease: Lease) -> None:
        """Set the lease (permission to read in place) of the message that is handled next. Called
        only by the mailbox."""
        self._lease = lease

    def owned_copy(self, message: M) -> M:
        """Return the current message. If its arrays are views of a channel's shared memory, return
        a copy that owns its arrays."""
        return message if self._lease is None else copy_arrays(message)

    def hold_lease(self) -> Lease | None:
        """Return the lease that keeps the current message readable after its handler returns, or
        None if the message owns its memory.

        The caller must release the lease, on the loop. May be called only while a message is being
        handled.
        """
        lease, self._lease = self._lease, None
        return lease


class Actor:
    """Base class of all actors. Each actor is created in the process of its node, with its
    configuration as the only argument."""

    context: Context

    def __init__(self, config: Any) -> None:
        """Store nothing by default. `config` is the actor's configuration from the topology
        (`ActorSpec.config`)."""

    def setup(self) -> ReadyInfo:
        """Load what the actor needs, such as a model, and return the record that it publishes to
        the other actors.

        Runs before the actor receives any message, and may take a long time. If it raises an
        exception whose class sets `picklable = True`, `System.start` raises that exception in the
        caller.
        """
        return None

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Store the context. `ready` maps each actor's name to the record that it published. All
        actors are set up by now."""
        self.context = context

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of the messages that this actor receives, by message class."""
        return {}

    def span_names(self) -> Mapping[type, str]:
        """Return the names under which traces show the handling of each message class. A class that
        is not in the mapping appears under its own name."""
        return {}

    def before_trace(self) -> None:
        """Record the spans of unfinished work. Called just before a trace is collected."""

    def on_ready(self, outbox: Outbox) -> None:
        """React to an outbox that has room again, after its `ready` was False or messages were
        queued in it."""

    def progress(self) -> Progress | None:
        """Return the progress of the current work for the watchdog, or None if there is no work."""
        return None

    def may_stay_awake(self) -> bool:
        """Return True if the loop, once woken, may poll for messages instead of sleeping. Return
        False while the actor's own threads need the interpreter lock."""
        return True

    def expects_death(self) -> bool:
        """Return True if more nodes (processes) are expected to die, because a search for the
        request that killed earlier ones is in progress.

        Expected deaths count against a separate restart budget. Called only on actors in the user's
        process.
        """
        return False

    def rehearse(self) -> Iterator[object]:
        """Warm up the code that handles an upcoming message by running it on a stand-in for the
        actor's state.

        Yields after each part so that the loop can poll for messages. Called when another node has
        woken this one ahead of a message.
        """
        return iter(())

    def reset(self) -> ReadyInfo | Recreate:
        """Reset the actor after a cut, in which all actors restart and unhandled messages are lost.

        Discard all requests, keep expensive state (a model, a tokenizer), and return the record
        that the actor publishes. Work on threads or devices must have ended when this method
        returns. `start` is called next, with a new context. By default, returns `RECREATE`: the
        node creates a new actor.
        """
        return RECREATE

    def stop(self) -> None:
        """Stop threads and release resources that process exit does not free. Called at shutdown
        and when a new actor replaces this one."""

    def statistics(self) -> dict[str, Any]:
        """Return the actor's own statistics, which `System.statistics()` includes."""
        return {}
