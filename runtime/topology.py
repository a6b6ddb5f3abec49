"""The declared structure of a system: actors, the nodes (processes) in which they run, and the
edges (one-way channels) between them.

Everything is declared and validated before anything starts. Each edge has one writer. Edges whose
traffic is not bounded by a protocol must not form a cycle, so no cycle of full outboxes can grow
without limit.
"""

from __future__ import annotations

import dataclasses
import graphlib
import importlib
from collections.abc import Mapping
from typing import Any

from nanoactor.runtime.actor import Actor
from nanoactor.runtime.errors import TopologyError


@dataclasses.dataclass(frozen=True, slots=True)
class ActorSpec:
    """Specification of one actor: its name, its class, which is imported in the actor's process,
    and its configuration."""

    name: str
    factory: str
    """Subclass of `Actor` as "package.module:Class"; called with `config`."""
    config: Any
    """Picklable configuration, which is sent to the actor's process at start."""

    def create(self) -> Actor:
        """Import the class and return an actor that is not set up yet. Raises `TopologyError` if it
        is no `Actor` class."""
        module, _, name = self.factory.partition(":")
        factory = getattr(importlib.import_module(module), name, None)
        if not (isinstance(factory, type) and issubclass(factory, Actor)):
            raise TopologyError(f"{self.factory} is not an Actor class")
        return factory(self.config)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSpec:
    """Specification of one process: its actors, which share one event loop, and its environment."""

    name: str
    actors: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that are set for this process only, before it starts."""
    blocked_modules: tuple[str, ...] = ()
    """Top-level packages that cannot be imported in this process, to keep light processes free of
    heavy imports."""
    descriptors: tuple[int, ...] = ()
    """Additional file descriptors that the child process inherits. The caller still owns the
    parent's copies."""
    nice: int = 0
    """Niceness of the process, as in `os.nice`."""
    wakes_early: bool = False
    """True if other nodes may wake this node ahead of work. It then polls for a moment before it
    sleeps."""
    group: str = ""
    """Name of the node's group; empty if it belongs to none.

    Nodes of a group wait for one another by means other than messages. After any node's death they
    cannot be asked to stop, so all of them are replaced.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeSpec:
    """A one-way channel from one actor to one or more others. Each target receives every
    message."""

    source: str
    targets: tuple[str, ...]
    capacity: int = 1 << 16
    """Capacity in bytes: a power of two, at least twice the size of the largest record."""
    bound: int | None = None
    """Maximum number of queued messages that the protocol allows; None if the protocol sets no
    bound."""
    paced: bool = False
    """True if the outbox counts as ready only once the targets have read everything and the source
    has no unread messages.

    A source that merges messages (see `Outbox.ready`) then merges whenever a target or the source
    itself lags.
    """
    name: str = ""
    """Name by which the source addresses the edge. If empty, the name of the only target is
    used."""

    @property
    def label(self) -> str:
        """Name by which the source addresses the edge."""
        return self.name or next(iter(self.targets), "nobody")


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """All actors, nodes (processes) and edges (channels) of a system. Nodes start together and stop
    in reverse order."""

    actors: tuple[ActorSpec, ...]
    nodes: tuple[NodeSpec, ...]
    edges: tuple[EdgeSpec, ...]
    local: str
    """Name of the node that runs in the caller's process, on its event loop."""

    def validate(self) -> None:
        """Raise a `TopologyError` that describes the first mistake found, if there is one."""
        names = [actor.name for actor in self.actors]
        _check_unique("actor", names)
        _check_unique("node", [node.name for node in self.nodes])
        _check_unique("edge", [f"{edge.source} -> {edge.label}" for edge in self.edges])
        placed = [actor for node in self.nodes for actor in node.actors]
        _check_unique("placement of actor", placed)
        if set(placed) != set(names):
            raise TopologyError(
                "every actor must be placed on a node, and only declared actors may be placed; "
                "unplaced or undeclared actors: "
                f"{set(placed) ^ set(names)}"
            )
        if self.local not in {node.name for node in self.nodes}:
            raise TopologyError(f"the local node {self.local!r} is not declared")
        for edge in self.edges:
            _check_edge(edge, set(names))
            self._check_targets_on_one_side(edge)
        self._check_cycles()

    def _check_targets_on_one_side(self, edge: EdgeSpec) -> None:
        """Raise `TopologyError` if an edge has targets both in the source's node (process) and in
        other nodes. Such an edge would need two outboxes."""
        remote = [target for target in edge.targets if self.crosses_nodes(edge.source, target)]
        if remote and len(remote) < len(edge.targets):
            raise TopologyError(
                f"edge {edge.source} -> {edge.label} has targets in the same node and in other "
                f"nodes ({', '.join(remote)}); give each group of targets its own edge, or "
                "place all targets on one side"
            )

    def _check_cycles(self) -> None:
        graph: dict[str, set[str]] = {}
        for edge in self.edges:
            if edge.bound is None:
                graph.setdefault(edge.source, set()).update(edge.targets)
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            path = " -> ".join(reversed(error.args[1]))
            raise TopologyError(
                f"unbounded edges form a cycle ({path}), so an outbox in it could grow without "
                "end. Give one of these edges the bound that its protocol guarantees"
            ) from error

    def node_of(self, actor: str) -> str:
        """Return the name of the node in which an actor runs."""
        return next(node.name for node in self.nodes if actor in node.actors)

    def crosses_nodes(self, source: str, target: str) -> bool:
        """Return True if two actors run in different nodes (processes)."""
        return self.node_of(source) != self.node_of(target)


def _check_unique(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise TopologyError(f"{what} {name!r} is declared twice")


def _check_edge(edge: EdgeSpec, actors: set[str]) -> None:
    label = f"edge {edge.source} -> {edge.label}"
    unknown = {edge.source, *edge.targets} - actors
    if unknown or not edge.targets:
        raise TopologyError(f"{label}: unknown or missing actors {sorted(unknown)}")
    if len(edge.targets) > 1 and not edge.name:
        raise TopologyError(f"{label}: an edge with several targets needs a name")
    if edge.source in edge.targets:
        raise TopologyError(
            f"{label}: an actor cannot send messages to itself; call a method instead"
        )
