"""Creation of a topology's channels, which are rings or queues, and their assignment to the nodes
(processes) that open them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from nanoactor.runtime.alarm import AlarmPlan, create_alarms
from nanoactor.runtime.node import NodePlan
from nanoactor.runtime.queue import create_queue
from nanoactor.runtime.ring import create_ring
from nanoactor.runtime.topology import EdgeSpec, Topology
from nanoactor.runtime.transport import ReceiverEnd, SenderEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Options of a `System` that do not depend on its topology, such as the transport and time
    limits."""

    transport: Literal["ring", "queue"] = "ring"
    """Transport that carries messages between nodes."""
    debug: bool = False
    """True if records have checksums, arrays are always read in place, and released space is
    overwritten."""
    debug_delay_ms: float = 0.0
    """Upper limit of the random delay, in milliseconds, of each message on each edge. The order of
    messages on an edge is kept."""
    record_dir: str | None = None
    """Directory in which every actor's messages are recorded for `recording.replay`; None if
    nothing is recorded."""
    spin_us: float = 0.0
    """Time in microseconds for which a ring's reader polls before it blocks. Useful only if cores
    are idle."""
    awake_seconds: float = 0.0
    """Time in seconds for which a woken node polls for messages before it sleeps. Useful only if
    cores are idle."""
    start_timeout: float = 600.0
    """Seconds within which every node must be ready after the start."""
    stop_timeout: float = 5.0
    """Seconds within which a node must stop before it is killed."""
    stall_timeout: float | None = None
    """Seconds without a sign of activity, while there is work, after which a node counts as
    stalled; None to disable the check."""
    max_restarts: int = 0
    """Maximum number of node deaths within `restart_window` seconds from which the system recovers.
    With 0, the first death ends the system."""
    restart_window: float = 300.0


def wire(topology: Topology, options: Options) -> dict[str, NodePlan]:
    """Create a channel for every edge between different nodes (processes). Return, by node name,
    each node's plan, which lists its actors and channel ends."""
    actors = {actor.name: actor for actor in topology.actors}
    alarms = _create_alarms(topology, options)
    plans = {
        node.name: NodePlan(
            name=node.name,
            actors=tuple(actors[name] for name in node.actors),
            debug_delay_ms=options.debug_delay_ms,
            record_dir=options.record_dir,
            alarm=alarms.get(node.name),
        )
        for node in topology.nodes
    }
    try:
        for edge in topology.edges:
            source = topology.node_of(edge.source)
            plans[source].edges.append(edge)
            if topology.crosses_nodes(edge.source, edge.targets[0]):
                plans[source].senders[edge], receivers = _create_edge(edge, options)
                for target, end in zip(edge.targets, receivers, strict=True):
                    plans[topology.node_of(target)].receivers.append((edge, target, end))
    except BaseException:
        for plan in plans.values():
            for descriptor in plan.descriptors:
                os.close(descriptor)
        raise
    return plans


def _create_alarms(topology: Topology, options: Options) -> dict[str, AlarmPlan]:
    woken = [node.name for node in topology.nodes if node.wakes_early]
    if len(woken) < 2 or not options.awake_seconds:
        return {}
    return create_alarms(woken, options.awake_seconds)


def _create_edge(edge: EdgeSpec, options: Options) -> tuple[SenderEnd, Sequence[ReceiverEnd]]:
    readers = len(edge.targets)
    if options.transport == "ring":
        return create_ring(readers, edge.capacity, options.debug, options.spin_us)
    return create_queue(readers, edge.capacity, options.debug)
