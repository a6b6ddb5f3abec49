"""A system of actors: the nodes (processes) of a topology from their start to their end.

The system runs in the user's process and on the user's event loop, where a pidfd becomes readable
when a child has died. It installs no signal handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime import control
from nanoactor.runtime.abandoning import close_soon
from nanoactor.runtime.actor import Actor
from nanoactor.runtime.affinity import LoopAffinity
from nanoactor.runtime.children import check_environment, resource_error
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.nodes import Nodes
from nanoactor.runtime.recoveries import RecoveryCallbacks
from nanoactor.runtime.recovery import Death
from nanoactor.runtime.supervisor import Supervisor
from nanoactor.runtime.topology import Topology
from nanoactor.runtime.tracing import NodeTrace
from nanoactor.runtime.wiring import Options


class System:
    """The actors of a topology, running in child processes and in the user's process. A system may
    be used only in the process and on the event loop in which it was started."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        on_death: Callable[[BaseException], None],
        has_work: Callable[[], bool] = lambda: False,
        on_cut: Callable[[Sequence[Death]], int] = lambda deaths: 0,
        on_recovered: Callable[[], None] = lambda: None,
        before_restart: Callable[[Collection[str]], Awaitable[None]] | None = None,
    ) -> None:
        """`on_death` is called once, on the loop, when the running system has become unusable.
        Nodes are watched for stalls, with the options' `stall_timeout`, while `has_work` returns
        True.

        When the system recovers from a death, `on_cut` is called, possibly several times, with the
        deaths that have not been reported to it yet. `on_recovered` is called last. Between the
        two calls no message can be sent, and earlier messages that were not handled are lost.
        `on_cut` returns how many of the most recent deaths no longer have a cause; these do not
        count against the restart budget. `before_restart` is awaited with the names of the nodes
        that are about to be restarted. If any of these three callbacks raises, the system fails
        with that error.
        """
        topology.validate()
        self._affinity = LoopAffinity()
        self._nodes = Nodes(topology, options)
        self.ready = self._nodes.ready
        """Record that each actor published when it became ready, by actor name."""
        self._supervisor = Supervisor(
            self._nodes,
            options,
            on_death,
            has_work,
            RecoveryCallbacks(on_cut, on_recovered, before_restart),
        )
        self._recoveries = self._supervisor.recoveries
        self.restarts: Mapping[str, int] = self._recoveries.restarts
        """Number of times that each node was replaced, by node name."""
        self._closing = False
        self._closed: asyncio.Future[None] | None = None
        """Future that resolves when the system has closed; None until `close` is called."""

    async def start(self) -> None:
        """Start every node (process) and wait until all of them are ready.

        If an actor's setup fails, raises the actor's exception if its class is marked as
        `picklable`, otherwise `StartupFailed` with the name of the actor or node and the traceback.
        In either case, all processes have already ended.
        """
        if self._affinity.loop is not None:
            raise RuntimeFault("a system can start only once; create a new one")
        check_environment()
        loop = self._affinity.record()
        try:
            await self._nodes.start(loop, self._supervisor)
        except BaseException as error:
            await self.close()
            if self.dead is not None and error is not self.dead:
                raise self.dead from None  # the first failure; it ended the other nodes
            if isinstance(error, OSError):
                raise resource_error(error) from error
            raise
        self._supervisor.begin()

    def set_topology(self, topology: Topology) -> None:
        """Replace the topology that is used for nodes started from now on. Nodes, actors and edges
        must have the same names as before."""
        self._nodes.topology = topology

    def actor(self, name: str) -> Actor:
        """Return an actor of the node that runs in this process, by name."""
        return self._nodes.own.actors[name]

    def check_usable(self) -> None:
        """Raise `NotUsableHere` unless the process and the event loop are those in which the system
        was started."""
        self._affinity.check()

    @property
    def is_ours(self) -> bool:
        """True if this process started the system. False in a process forked from it."""
        return self._affinity.is_this_process

    @property
    def is_here(self) -> bool:
        """True if the running event loop is the one on which the system was started."""
        return self._affinity.is_here

    @property
    def running_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """The loop on which the system was started, if it is not the current one and still runs in
        another thread; otherwise None."""
        return self._affinity.loop_elsewhere

    @property
    def dead(self) -> BaseException | None:
        """The error that made the system unusable; None while it is usable."""
        return self._supervisor.dead

    @property
    def recovering(self) -> tuple[str, float] | None:
        """(names of the dead nodes, monotonic start time in seconds) of the current recovery; None
        if there is none."""
        return self._recoveries.current

    @property
    def restart_seconds(self) -> float:
        """Total time in seconds that was spent on recoveries."""
        return self._recoveries.seconds

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the child processes that have been started, by node name."""
        return {child.name: child.pid for child in self._nodes.children if child.pid}

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of every actor, by actor name. Nodes that do not answer within one
        second are left out."""
        figures = dict(self._nodes.own.statistics())
        for answer in await self._nodes.ask(control.Query("statistics"), 1.0):
            figures |= answer
        return figures

    async def trace(self, since: int = 0) -> list[NodeTrace]:
        """Collect the actors' spans that ended after `since`, in ns of the monotonic clock.

        Each track (timeline row) keeps only its latest spans. Nodes that do not answer within 5
        seconds are left out.
        """
        ours = self._nodes.own.trace(since)
        return [ours, *await self._nodes.ask(control.Query("trace", (since,)), 5.0)]

    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """Return the busy fraction (0 to 1) of each track (timeline row) in each of `bins`
        intervals, by track name.

        The intervals start at `begin` and are `width` long, both in ns of the monotonic clock.
        Nodes that do not answer within one second are left out.
        """
        shares = self._nodes.own.activity(begin, width, bins)
        for answer in await self._nodes.ask(control.Query("activity", (begin, width, bins)), 1.0):
            shares |= answer
        return shares

    async def close(self) -> None:
        """Stop the nodes (processes) in reverse order of their start, and wait until all have
        ended.

        Concurrent calls wait for the same shutdown. In a process forked from the one that started
        the system, this does nothing.
        """
        if not self.is_ours:
            return
        loop = self.running_elsewhere
        if loop is not None and await run_on(loop, self.close):
            return
        if not self.is_here:
            await asyncio.to_thread(self.end)
            return
        if self._closed is None:
            self._closing = True
            self._supervisor.stop()
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._recoveries.cancel()
        await self._nodes.end()

    def end(self) -> None:
        """Stop every node (process) without the event loop, which no longer runs. Blocks until all
        have ended."""
        is_closing_elsewhere = self._closing and self._closed is None
        if not self.is_ours or is_closing_elsewhere or self._nodes.has_ended:
            return
        self._closing = True
        self._supervisor.stop()
        self._nodes.end_without_loop()

    def abandon(self) -> None:
        """Kill every child process without waiting until it has ended. May be called from any
        thread."""
        loop = self._affinity.loop
        if loop is None or not self.is_ours or self._closed is not None:
            return
        self._nodes.children.kill()
        close_soon(loop, self.close, self.end, lambda: self._nodes.has_ended)


async def run_on(
    loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Run a coroutine function to completion on the loop of another thread. Return False if that
    loop stops first."""
    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), loop))
    while not (await asyncio.wait((future,), timeout=0.1))[0]:
        if not loop.is_running():
            return False
    await future
    return True
