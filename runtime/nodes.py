"""All nodes (processes) of a topology: this process's own node and those of the child processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Protocol

from nanoactor.runtime import control
from nanoactor.runtime.actor import ReadyInfo
from nanoactor.runtime.children import ChildProcess, Children
from nanoactor.runtime.codec import check_schema
from nanoactor.runtime.errors import StartupFailed
from nanoactor.runtime.node import Node
from nanoactor.runtime.process import occupy_standard_descriptors
from nanoactor.runtime.topology import NodeSpec, Topology
from nanoactor.runtime.wiring import Options, wire

log = logging.getLogger("nanoactor.system")

_LATE_WARNING_SECONDS = 30.0
"""Seconds of startup after which a warning lists the nodes that are not ready."""


class Observer(Protocol):
    """Object that is notified of what happens to nodes. Its methods are called on the event
    loop."""

    def on_message(self, child: ChildProcess, message: Any) -> None:
        """React to a control message from a child, or to None if its channel is closed."""

    def on_exit(self, child: ChildProcess) -> None:
        """React to the exit of a child. Its last message may still be in its channel."""

    def on_failure(self, actor: str, error: BaseException) -> None:
        """React to the error of an actor that runs in this process."""


class Nodes:
    """The nodes of a topology, which are started, cut (restarted with new channels), asked and
    ended together. `System` owns them. No node exists until `start` is called."""

    def __init__(self, topology: Topology, options: Options) -> None:
        self.topology = topology
        """Topology that is used for nodes started from now on."""
        self._options = options
        self.children = Children()
        self._own: Node | None = None
        self._loop: asyncio.AbstractEventLoop
        self._observer: Observer
        self.ready: dict[str, ReadyInfo] = {}
        """Record that each actor published when it became ready, by actor name."""
        self.start_seconds: dict[str, float] = {}
        """Longest time in seconds that each node took to become ready, by node name."""
        self.has_ended = False
        """True once all child processes have ended."""

    @property
    def own(self) -> Node:
        """The node of this process."""
        assert self._own is not None, "the system was not started"
        return self._own

    @property
    def specs(self) -> dict[str, NodeSpec]:
        """Specification of each node, by node name."""
        return {node.name: node for node in self.topology.nodes}

    async def start(self, loop: asyncio.AbstractEventLoop, observer: Observer) -> None:
        """Start every node, wait until all of them are ready, and start the message flow.

        Raises `StartupFailed` if they are not ready in time, or the error of the node that failed
        first. In either case, the caller must end the nodes.
        """
        self._loop, self._observer = loop, observer
        late = loop.call_later(_LATE_WARNING_SECONDS, self._warn_late)
        try:
            await asyncio.wait_for(self._launch(), self._options.start_timeout)
        except TimeoutError:
            raise StartupFailed(
                f"the engine was not ready after {self._options.start_timeout:.0f} s: it waited "
                f"for node(s) {self.describe_pending()}; raise start_timeout if the model is large "
                "or the disk is slow"
            ) from None
        finally:
            late.cancel()

    async def _launch(self) -> None:
        occupy_standard_descriptors()
        plans = wire(self.topology, self._options)
        self._own = Node(plans.pop(self.topology.local), self._observer.on_failure)
        self.children.launch(self.specs, plans, self._loop, self._observer.on_message)
        self.ready |= self._own.setup()
        await self.begin_flow()

    def describe_pending(self) -> str:
        """Return the names of the nodes that startup waits for, each with the state of its
        process."""
        late = self.children.pending()
        return ", ".join(f"{child.name} ({child.condition()})" for child in late)

    def _warn_late(self) -> None:
        if (late := self.describe_pending()) and not self.children.is_ending:
            log.warning(
                "the engine is not ready after %.0f s: it waits for node(s) %s, up to %.0f s in "
                "total",
                _LATE_WARNING_SECONDS,
                late,
                self._options.start_timeout,
            )

    async def begin_flow(self) -> None:
        """Wait until all nodes are ready, then start the message flow."""
        waiting = list(self.children)
        reports = await asyncio.gather(*(child.ready for child in waiting))
        for child, report in zip(waiting, reports, strict=True):
            check_schema(child.name, report.schema)
            self.ready |= report.actors
            longest = max(self.start_seconds.get(child.name, 0.0), child.start_seconds)
            self.start_seconds[child.name] = longest
        for child in waiting:  # no effect if the child is watched already
            self._loop.add_reader(child.pidfd, self._child_exited, child)
        self.children.send(control.Start(self.ready))
        self.own.start(self._loop, self.ready)
        await asyncio.gather(*(child.started for child in self.children))

    def cut(self, victims: Collection[str]) -> None:
        """Start new processes for the victims, and make all other nodes restart their actors with
        new channels between all nodes. `begin_flow` must be called next."""
        plans = wire(self.topology, self._options)
        self.ready |= self.own.cut(plans.pop(self.topology.local))
        specs = self.specs
        for child in list(self.children):
            if child.name in victims:
                self._stop_watching(child)
                self.children.replace(specs[child.name], plans[child.name])
            else:
                child.cut(plans[child.name])

    def _child_exited(self, child: ChildProcess) -> None:
        """Handle a readable pidfd."""
        self._stop_watching(child)
        self._observer.on_exit(child)

    def _stop_watching(self, child: ChildProcess) -> None:
        if child.pidfd >= 0:
            self._loop.remove_reader(child.pidfd)

    async def ask(self, query: control.Query, seconds: float) -> list[Any]:
        """Send a query to all child processes and return the replies that arrive within
        `seconds`."""
        answers = [answer for child in self.children if (answer := child.ask(query)) is not None]
        if answers:
            await asyncio.wait(answers, timeout=seconds)
        return [answer.result() for answer in answers if answer.done()]

    def kill(self, reason: str) -> None:
        """Kill all child processes. From now on, this process's own node raises `PeerBroken` with
        this reason if it sends to them."""
        if self._own is not None:
            self._own.break_edges(reason)
        self.children.kill()

    async def end(self) -> None:
        """Stop the nodes in reverse order of their start, kill those that take too long, and wait
        until all have ended."""
        for child in self.children:
            self._stop_watching(child)
        try:
            await self.children.end(self._options.stop_timeout)
        except asyncio.CancelledError:  # the loop ends and cancels its tasks
            self.children.end_without_loop(self._options.stop_timeout)
            raise
        finally:
            self._close()

    def end_without_loop(self) -> None:
        """Stop the nodes like `end`, but without the event loop, which no longer runs. Blocks until
        all have ended."""
        self.children.end_without_loop(self._options.stop_timeout)
        self._close()

    def _close(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if self._own is not None:
                self._own.stop()
            self.children.close()
