"""From a topology to what each node must open: makes rings and queues, hands out their ends."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from nanoactor.runtime.node import NodePlan
from nanoactor.runtime.queue import create_queue
from nanoactor.runtime.ring import create_ring
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, Topology, Transport
from nanoactor.runtime.transport import ReceiverEnd, SenderEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a system runs, apart from its shape."""

    transport: Transport | None = None
    """Overrides the transport of every edge."""
    debug: bool = False
    """Checksums on records, released space overwritten."""
    debug_delay_ms: float = 0.0
    """Delay each message on each edge by a random time up to this, keeping the edge's order."""
    record_dir: str | None = None
    """Where every actor's messages are written down, for `recording.replay`."""
    spin_us: float = 0.0
    """How long a ring's reader looks again before it blocks; only where cores are idle."""
    start_timeout: float = 600.0
    """Seconds until every node must be ready."""
    stop_timeout: float = 5.0
    """Seconds that a node may take to end before it is killed."""
    stall_timeout: float | None = None
    """Seconds without a sign of life, while there is work, after which the system is given up."""


@dataclasses.dataclass(slots=True)
class _Draft:
    actors: list[ActorSpec]
    edges: list[EdgeSpec]
    senders: dict[int, SenderEnd]
    receivers: list[tuple[str, str, ReceiverEnd]]


def wire(topology: Topology, options: Options) -> dict[str, NodePlan]:
    """Make the transport of every edge that crosses nodes; the plan of each node by its name."""
    actors = {actor.name: actor for actor in topology.actors}
    drafts = {
        node.name: _Draft([actors[name] for name in node.actors], [], {}, [])
        for node in topology.nodes
    }
    made: list[int] = []
    try:
        for edge in topology.edges:
            _wire_edge(topology, edge, drafts, options, made)
    except BaseException:
        for descriptor in made:
            os.close(descriptor)
        raise
    return {
        name: NodePlan(
            name,
            tuple(draft.actors),
            tuple(draft.edges),
            draft.senders,
            tuple(draft.receivers),
            options.debug_delay_ms,
            options.record_dir,
        )
        for name, draft in drafts.items()
    }


def _wire_edge(
    topology: Topology,
    edge: EdgeSpec,
    drafts: dict[str, _Draft],
    options: Options,
    made: list[int],
) -> None:
    source = topology.node_of(edge.source)
    remote = [target for target in edge.targets if topology.node_of(target) != source]
    draft = drafts[source]
    draft.edges.append(edge)
    if not remote:
        return
    sender, receivers = _create(edge, len(remote), options)
    made += [*sender.descriptors, *(fd for end in receivers for fd in end.descriptors)]
    draft.senders[len(draft.edges) - 1] = sender
    for target, end in zip(remote, receivers, strict=True):
        label = f"{edge.source} -> {edge.label}" if edge.name else edge.source
        drafts[topology.node_of(target)].receivers.append((label, target, end))


def _create(
    edge: EdgeSpec, readers: int, options: Options
) -> tuple[SenderEnd, Sequence[ReceiverEnd]]:
    if (options.transport or edge.transport) == "ring":
        return create_ring(readers, edge.capacity, options.debug, options.spin_us)
    return create_queue(readers, edge.capacity, options.debug)
