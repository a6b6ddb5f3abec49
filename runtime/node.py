"""A node: the actors that share one process and one event loop, and their edges (one-way
channels)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.actor import RECREATE, Actor, Context, Progress, ReadyInfo
from nanoactor.runtime.alarm import Alarm, AlarmPlan
from nanoactor.runtime.mailbox import DelayedDelivery, Mailbox
from nanoactor.runtime.outbox import LocalOutbox, Outbox, RemoteOutbox
from nanoactor.runtime.recording import RecordedOutbox, Recorder
from nanoactor.runtime.topology import ActorSpec, EdgeSpec
from nanoactor.runtime.tracing import NodeTrace, Track
from nanoactor.runtime.transport import Deliver, Fatal, Receiver, ReceiverEnd, SenderEnd


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlan:
    """The part of the topology that one node (a process that runs actors) needs, with the channel
    ends that the node must open; picklable."""

    name: str
    actors: tuple[ActorSpec, ...]
    edges: list[EdgeSpec] = dataclasses.field(default_factory=list)
    """All edges whose source is an actor of this node."""
    senders: dict[EdgeSpec, SenderEnd] = dataclasses.field(default_factory=dict)
    """Writing end of each edge in `edges` whose targets are in other nodes."""
    receivers: list[tuple[EdgeSpec, str, ReceiverEnd]] = dataclasses.field(default_factory=list)
    """(edge, target actor, reading end) of every edge from another node to an actor of this
    node."""
    debug_delay_ms: float = 0.0
    record_dir: str | None = None
    alarm: AlarmPlan | None = None
    """Eventfds for parallel wake-ups; None if the node takes no part in them."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the node's process must inherit."""
        ends: list[SenderEnd | ReceiverEnd] = [*self.senders.values()]
        ends += [end for _, _, end in self.receivers]
        alarm = self.alarm.descriptors if self.alarm else ()
        return (*(fd for end in ends for fd in end.descriptors), *alarm)

    def remapped(self, mapping: Mapping[int, int]) -> NodePlan:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        receivers = [(edge, name, end.remapped(mapping)) for edge, name, end in self.receivers]
        return dataclasses.replace(
            self,
            senders={edge: end.remapped(mapping) for edge, end in self.senders.items()},
            receivers=receivers,
            alarm=self.alarm.remapped(mapping) if self.alarm else None,
        )


class NodeEdges:
    """The ends of edges (one-way channels) in one node: the mailboxes and outboxes of its actors,
    and the opened transports behind them.

    Each cut closes the object and creates another one, because all channels are new then.
    """

    def __init__(
        self, plan: NodePlan, actors: Mapping[str, Actor], fatal: Callable[[str], Fatal]
    ) -> None:
        """`actors` are the node's actors, by name. `fatal` returns, for an actor's name, the
        function that is called with an error of that actor."""
        self._plan = plan
        self._actors = actors
        self._fatal = fatal
        self._loop: asyncio.AbstractEventLoop
        self.mailboxes: dict[str, Mailbox] = {}
        self._outboxes: dict[str, dict[str, Outbox]] = {}
        self._remote: list[tuple[str, RemoteOutbox]] = []
        self._receivers: list[tuple[EdgeSpec, str, Receiver]] = []
        self._recorders: dict[str, Recorder] = {}
        self.alarm: Alarm | None = None
        """Alarm that wakes other nodes ahead of work; None if the node takes no part in it."""
        self._unopened = set(plan.descriptors)
        """Inherited descriptors that no sender, receiver or alarm owns yet."""

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: Mapping[str, ReadyInfo],
        may_stay: Callable[[], bool],
        rehearse: Callable[[], Iterator[object]],
    ) -> None:
        """Give each actor a context with its outboxes, and open the writing ends. `ready` holds the
        record of every actor in the system, by actor name. `may_stay` and `rehearse` are passed on
        to the alarm."""
        self._loop = loop
        if self._plan.alarm is not None:
            self.alarm = Alarm(self._plan.alarm, loop, may_stay, rehearse)
            self._unopened -= set(self._plan.alarm.descriptors)
        for spec in self._plan.actors:
            self._open_mailbox(spec, ready)
        for edge in self._plan.edges:
            self._outboxes[edge.source][edge.label] = self._open_outbox(edge)

    def _open_mailbox(self, spec: ActorSpec, ready: Mapping[str, ReadyInfo]) -> None:
        actor, name, fatal = self._actors[spec.name], spec.name, self._fatal(spec.name)
        actor.context = Context(name, self._loop, self._outboxes.setdefault(name, {}), fatal)
        actor.context.alarm = self.alarm
        handlers = actor.handlers()
        if self._plan.record_dir is not None:
            self._recorders[name] = Recorder(self._plan.record_dir, spec, ready)
            handlers = self._recorders[name].handlers(handlers)
        mailbox = Mailbox(actor.context, handlers, fatal, actor.span_names())
        actor.context.send_self = mailbox.port(name).put
        self.mailboxes[name] = mailbox

    def _open_outbox(self, edge: EdgeSpec) -> Outbox:
        recorder = self._recorders.get(edge.source)
        outbox: Outbox
        if edge in self._plan.senders:
            outbox = self._open_remote_outbox(edge, recorder)
        else:
            puts = [self._local_put(edge, target) for target in edge.targets]
            outbox = LocalOutbox(edge.label, puts)
        return outbox if recorder is None else RecordedOutbox(outbox, recorder)

    def _open_remote_outbox(self, edge: EdgeSpec, recorder: Recorder | None) -> RemoteOutbox:
        actor, end = self._actors[edge.source], self._plan.senders[edge]
        sender = end.open()
        self._unopened -= set(end.descriptors)
        outbox = RemoteOutbox(
            edge.label,
            sender,
            self._loop,
            bound=edge.bound,
            on_ready=actor.on_ready if recorder is None else recorder.on_ready(actor.on_ready),
            fatal=self._fatal(edge.source),
            track=actor.context.track,
            paced=edge.paced,
        )
        self._remote.append((edge.source, outbox))
        return outbox

    def receive(self) -> None:
        """Open the reading ends, and deliver messages from other nodes from now on."""
        inputs: dict[str, list[Receiver]] = {}
        for source, outbox in self._remote:
            outbox.set_inputs(inputs.setdefault(source, []))
        for edge, target, end in self._plan.receivers:
            receiver = end.open()
            self._unopened -= set(end.descriptors)
            self._receivers.append((edge, target, receiver))
            inputs.setdefault(target, []).append(receiver)
            deliver = self.mailboxes[target].port(edge.source).deliver
            receiver.start(self._loop, self._delayed(deliver, edge, target), self._fatal(target))

    def _local_put(self, edge: EdgeSpec, target: str) -> Callable[[Any], None]:
        port = self.mailboxes[target].port(edge.source)
        if not self._plan.debug_delay_ms:
            return port.put
        delayed = self._delayed(port.deliver, edge, target)

        def put(message: Any) -> None:
            delayed(message, None, time.monotonic_ns())

        return put

    def _delayed(self, deliver: Deliver, edge: EdgeSpec, target: str) -> Deliver:
        delay = self._plan.debug_delay_ms
        if not delay:
            return deliver
        seed = f"{edge.source}>{edge.label}>{target}"
        return DelayedDelivery(deliver, self._loop, self._fatal(target), delay, seed)

    def mark_broken(self, reason: str) -> None:
        """Mark the channels to other nodes as broken. From then on, sending on these channels
        raises `PeerBroken`."""
        for _, outbox in self._remote:
            outbox.mark_broken(reason)

    def statistics(self, actor: str) -> dict[str, dict[str, Any]]:
        """Return the statistics of one actor's mailbox, outboxes and incoming channels."""
        outboxes = self._outboxes.get(actor, {})
        return {
            "mailbox": self.mailboxes[actor].statistics() if actor in self.mailboxes else {},
            "outboxes": {label: box.statistics() for label, box in outboxes.items()},
            "inboxes": {
                f"{edge.source} -> {edge.label}": dataclasses.asdict(receiver.statistics)
                for edge, target, receiver in self._receivers
                if target == actor
            },
        }

    def close(self) -> None:
        """Close all channels, recordings and tracks, and the descriptors that were not opened. A
        second call has no effect."""
        for _, outbox in self._remote:
            outbox.close()
        for _, _, receiver in self._receivers:
            receiver.close()
        if self.alarm is not None:
            self.alarm.close()
        for recorder in self._recorders.values():
            recorder.close()
        for name in self._outboxes:
            for track in self._actors[name].context.tracks:
                track.close()
        for descriptor in self._unopened:
            os.close(descriptor)
        self._unopened.clear()
        self._remote, self._receivers, self.alarm = [], [], None
        self.mailboxes, self._outboxes, self._recorders = {}, {}, {}


class Node:
    """The actors of one process, with their edges (one-way channels). The user's process and each
    child process have one node."""

    def __init__(self, plan: NodePlan, on_failure: Callable[[str, BaseException], None]) -> None:
        """`on_failure` is called once, with the actor's name and the error, when an actor's error
        ends the node."""
        self.plan = plan
        self.actors: dict[str, Actor] = {}
        self._on_failure = on_failure
        self._failed = False
        self._edges = NodeEdges(plan, self.actors, self._fatal)
        self._cpu_before = 0.0
        self._ready: dict[str, ReadyInfo] = {}
        self._is_running = False
        """True once the actors were started. Before, they have no statistics and no spans."""

    def setup(self, on_actor: Callable[[str], None] = lambda name: None) -> dict[str, ReadyInfo]:
        """Import, create and set up every actor. Return the record that each actor publishes, by
        actor name. `on_actor` is called with each actor's name before it is set up."""
        for spec in self.plan.actors:
            on_actor(spec.name)
            actor = spec.create()
            self.actors[spec.name] = actor
            self._ready[spec.name] = actor.setup()
        return self._ready

    def cut(
        self, plan: NodePlan, on_actor: Callable[[str], None] = lambda name: None
    ) -> dict[str, ReadyInfo]:
        """Restart with new edges (channels) after another node has died: close the current edges
        and reset every actor.

        Returns the record that each actor publishes, by actor name. `start` must be called next.
        """
        for actor in self.actors.values():
            if hasattr(actor, "context"):
                actor.context.retire()
        self._edges.close()
        self._failed = self._is_running = False
        self.plan, self._edges = plan, NodeEdges(plan, self.actors, self._fatal)
        for spec in plan.actors:
            on_actor(spec.name)
            ready = self.actors[spec.name].reset()
            if ready is RECREATE:
                self.actors[spec.name].stop()
                self.actors[spec.name] = spec.create()
                ready = self.actors[spec.name].setup()
            self._ready[spec.name] = ready
        return self._ready

    def start(self, loop: asyncio.AbstractEventLoop, ready: Mapping[str, ReadyInfo]) -> None:
        """Open the edges (channels), start the actors, then receive messages. `ready` holds the
        record of every actor in the system, by actor name."""
        self._edges.open(loop, ready, self._may_stay_awake, self._rehearse)
        self._cpu_before = time.process_time()
        for actor in self.actors.values():
            actor.start(actor.context, ready)
        self._is_running = True
        self._edges.receive()

    def _may_stay_awake(self) -> bool:
        return all(actor.may_stay_awake() for actor in self.actors.values())

    def expects_death(self) -> bool:
        """Return True if an actor expects nodes to die, because it is searching for the request
        that kills them."""
        return any(actor.expects_death() for actor in self.actors.values())

    def _rehearse(self) -> Iterator[object]:
        for name, actor in self.actors.items():
            try:
                yield from actor.rehearse()
            except GeneratorExit:  # closed before its end, for example by a cut
                raise
            except BaseException as error:
                self._fatal(name)(error)
                return

    def _fatal(self, actor: str) -> Fatal:
        plan = self.plan

        def fail(error: BaseException) -> None:
            if not self._failed and self.plan is plan:  # else it is from before a cut
                self._failed = True
                self._on_failure(actor, error)

        return fail

    def break_edges(self, reason: str) -> None:
        """Mark the channels to other nodes (processes) as broken after one has died. From then on,
        sending on these channels raises `PeerBroken`."""
        self._failed = True
        self._edges.mark_broken(reason)

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return, by actor name, the statistics of the actor's node, of the actor itself, and of
        its mailbox, outboxes and incoming channels."""
        figures: dict[str, dict[str, Any]] = {}
        node = {"name": self.plan.name, "cpu_seconds": time.process_time()}
        if (alarm := self._edges.alarm) is not None:
            node |= {"roused": alarm.wakeups, "looks": alarm.polls}
        for name, actor in self._started_actors:
            own = {"node": node, "actor": actor.statistics()}
            figures[name] = own | self._edges.statistics(name)
        return figures

    def progress(self) -> dict[str, Progress]:
        """Return the progress of work that the actors run outside the loop, by actor name. Actors
        that report no progress are left out."""
        found = {name: actor.progress() for name, actor in self._started_actors}
        return {name: progress for name, progress in found.items() if progress is not None}

    def trace(self, since: int = 0) -> NodeTrace:
        """Return, for every track (timeline row), the spans that ended after `since`, in ns of the
        monotonic clock."""
        tracks = [track.trace(self.plan.name, since) for track in self._tracks()]
        cpu = time.process_time() - self._cpu_before
        return NodeTrace(self.plan.name, tracks, cpu, time.monotonic_ns())

    def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """Return the busy fraction (0 to 1) of each track (timeline row) in each of `bins`
        intervals, by track name.

        The intervals start at `begin` and are `width` long, both in ns of the monotonic clock. Each
        value is a float32 array of length `bins`.
        """
        return {track.name: track.activity(begin, width, bins) for track in self._tracks()}

    def _tracks(self) -> list[Track]:
        """Return the tracks of all started actors, after the actors have recorded the spans of
        unfinished work."""
        for _, actor in self._started_actors:
            actor.before_trace()
        return [track for _, actor in self._started_actors for track in actor.context.tracks]

    @property
    def _started_actors(self) -> list[tuple[str, Actor]]:
        return list(self.actors.items()) if self._is_running else []

    def stop(self) -> None:
        """Stop the actors in reverse order of their start, then close the channels."""
        self._failed = True
        for actor in reversed(self.actors.values()):
            actor.stop()
        self._edges.close()
