"""The supervisor, which starts the nodes (processes) of a topology, detects and recovers from their
deaths, and ends them.

It runs in the user's process and on the user's event loop, where a pidfd becomes readable when a
child has died. It installs no signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime import control
from nanoactor.runtime.abandoning import close_soon
from nanoactor.runtime.actor import Actor, ReadyInfo
from nanoactor.runtime.children import ChildProcess, Children, check_environment, resource_error
from nanoactor.runtime.codec import check_schema
from nanoactor.runtime.errors import NotUsableHere, RuntimeFault, StartupFailed
from nanoactor.runtime.node import Node
from nanoactor.runtime.process import occupy_standard_descriptors
from nanoactor.runtime.recovery import Death, Deaths, details, start_limit
from nanoactor.runtime.topology import NodeSpec, Topology
from nanoactor.runtime.tracing import NodeTrace
from nanoactor.runtime.watchdog import Watchdog, kill_late
from nanoactor.runtime.wiring import Options, wire

log = logging.getLogger("nanoactor.system")

_LATE_WARNING_SECONDS = 30.0
"""Seconds of startup after which a warning lists the nodes that are not ready."""
_RESTART_FACTOR, _DEFAULT_STALL_SECONDS = 2.0, 60.0
"""A surviving node may take `_RESTART_FACTOR` times `stall_timeout` to restart. If `stall_timeout`
is None, `_DEFAULT_STALL_SECONDS` is used instead."""
_KILL_SECONDS = 5.0
"""Seconds within which a killed process must have ended."""


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
        deaths that were not reported to it yet. `on_recovered` is called last. Between the two
        calls no message can be sent, and earlier messages that were not handled are lost. `on_cut`
        returns the number of latest deaths whose cause is gone; they no longer count against the
        restart budget. `before_restart` is awaited with the names of the nodes that are about to be
        restarted. If any of these three callbacks raises, the system dies of that error.
        """
        topology.validate()
        self._topology = topology
        self._options = options
        self._on_death = on_death
        self._has_work = has_work
        self._on_cut, self._on_recovered = on_cut, on_recovered
        self._before_restart = before_restart
        self._deaths = Deaths(options.max_restarts, options.restart_window)
        self.restarts: Mapping[str, int] = self._deaths.restarts
        """Number of times that each node was replaced, by node name."""
        self._start_seconds: dict[str, float] = {}
        """Longest time in seconds that each node took to become ready, by node name."""
        self._recovery: asyncio.Task[None] | None = None
        self.recovering: tuple[str, float] | None = None
        """(names of the dead nodes, monotonic start time in seconds) of the current recovery; None
        if there is none."""
        self.restart_seconds = 0.0
        """Total time in seconds that was spent on recoveries."""
        self._is_running = False
        self._watchdog: Watchdog | None = None
        self._children = Children(self._on_message)
        self._node: Node | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._dead: BaseException | None = None
        self._closing = False
        self._stopped = False
        self._closed: asyncio.Future[None] | None = None
        """Future that resolves when the system has closed; None until `close` is called."""
        self.ready: dict[str, ReadyInfo] = {}
        """Record that each actor published when it became ready, by actor name."""

    async def start(self) -> None:
        """Start every node (process) and wait until all of them are ready.

        If an actor's setup fails, raises the actor's exception if its class is marked as
        `picklable`, otherwise `StartupFailed` with the name of the actor or node and the traceback.
        In either case, all processes have already ended.
        """
        if self._loop is not None:
            raise RuntimeFault("a system can start only once; create a new one")
        check_environment()
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        late = self._loop.call_later(_LATE_WARNING_SECONDS, self._warn_late)
        try:
            await asyncio.wait_for(self._start(), self._options.start_timeout)
        except TimeoutError:
            waited_for = self._describe_pending()
            await self.close()
            raise StartupFailed(
                f"the engine was not ready after {self._options.start_timeout:.0f} s: it waited "
                f"for node(s) {waited_for}; raise start_timeout if the model is large or the disk "
                "is slow"
            ) from None
        except BaseException as error:
            await self.close()
            if self._dead is not None and error is not self._dead:
                raise self._dead from None  # the first failure; it ended the other nodes
            if isinstance(error, OSError):
                raise resource_error(error) from error
            raise
        finally:
            late.cancel()
        self._is_running = True
        self._watch()

    def _watch(self) -> None:
        timeout = self._options.stall_timeout
        if timeout is not None and self._dead is None and not self._closing:
            self._watchdog = Watchdog(
                self._children, self._running_node, timeout, self._has_work, self._stalled
            )

    def _describe_pending(self) -> str:
        """Return the names of the nodes that startup waits for, each with the state of its
        process."""
        late = self._children.pending()
        return ", ".join(f"{child.name} ({child.condition()})" for child in late)

    def _warn_late(self) -> None:
        if (late := self._describe_pending()) and not self._closing and self._dead is None:
            log.warning(
                "the engine is not ready after %.0f s: it waits for node(s) %s, up to %.0f s in "
                "total",
                _LATE_WARNING_SECONDS,
                late,
                self._options.start_timeout,
            )

    async def _start(self) -> None:
        assert self._loop is not None
        occupy_standard_descriptors()
        plans = wire(self._topology, self._options)
        local = plans.pop(self._topology.local)
        self._node = Node(local, self._local_failed)
        self._children.launch(self._specs, plans, self._loop)
        self.ready |= self._node.setup()
        await self._begin_flow()

    def set_topology(self, topology: Topology) -> None:
        """Replace the topology that is used for nodes started from now on. Nodes, actors and edges
        must have the same names as before."""
        self._topology = topology

    @property
    def _specs(self) -> dict[str, NodeSpec]:
        return {node.name: node for node in self._topology.nodes}

    async def _begin_flow(self) -> None:
        """Wait until all nodes are ready, then start the message flow."""
        assert self._loop is not None
        waiting = list(self._children)
        reports = await asyncio.gather(*(child.ready for child in waiting))
        for child, report in zip(waiting, reports, strict=True):
            check_schema(child.name, report.schema)
            self.ready |= report.actors
            longest = max(self._start_seconds.get(child.name, 0.0), child.start_seconds)
            self._start_seconds[child.name] = longest
        for child in waiting:  # no effect if the child is watched already
            self._loop.add_reader(child.pidfd, self._child_died, child)
        self._children.send(control.Start(self.ready))
        self._running_node.start(self._loop, self.ready)
        await asyncio.gather(*(child.started for child in self._children))

    # -- deaths ---------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Replace dead nodes (processes) until none is left. Each attempt restarts the actors of
        all nodes with new channels between them."""
        begin = time.monotonic()
        while self._deaths.victims and self._dead is None and not self._closing:
            self.recovering = ", ".join(self._deaths.victims), begin
            if self._run_callback(lambda: self._deaths.report(self._on_cut)):
                await asyncio.sleep(self._deaths.delay())
                await self._replace_victims()
        self._recovery, self.recovering = None, None
        if self._dead is None and not self._closing:
            seconds = time.monotonic() - begin
            self.restart_seconds += seconds
            log.warning("all nodes are running again after %.1f s", seconds)
            if self._run_callback(self._on_recovered):
                self._watch()

    async def _replace_victims(self) -> None:
        victims: dict[str, BaseException] = {}
        try:
            await self._call_before_restart()
            async with asyncio.timeout(self._options.start_timeout):
                await asyncio.gather(*(child.bootstrapped for child in self._children))
                # No await until all survivors are notified: a death recorded earlier is among these
                # victims, and one recorded later makes the awaits below fail.
                victims = self._deaths.pop_victims()
                await self._restart_nodes(victims)
        except TimeoutError:
            await self._kill_all_late(bool(victims))
        except Exception as error:
            if not victims or not self._deaths.victims:  # no other death, so a retry would not help
                self._die(resource_error(error) if isinstance(error, OSError) else error)

    async def _call_before_restart(self) -> None:
        """Await `before_restart` with the names of all victims, including nodes that die in the
        meantime."""
        notified: set[str] = set()
        while self._before_restart is not None and (new := self._deaths.victims.keys() - notified):
            notified |= new
            await self._before_restart(new)

    async def _kill_all_late(self, can_continue: bool) -> None:
        """Kill the nodes that are not ready when the restart timeout expires. They are then
        replaced like any dead node.

        The system dies if `can_continue` is False or if one of these nodes does not end.
        """
        late, limit = self._children.pending(), self._options.start_timeout
        message = (
            f"not ready again after {limit:.0f} s: the engine waited for node(s) "
            f"{self._describe_pending()}"
        )
        for child in late if can_continue else ():
            self._kill_hung(child, message)
        if not can_continue or not await self._children.wait_ended(late, _KILL_SECONDS):
            self._die(StartupFailed(message))

    def _run_callback(self, callback: Callable[[], None]) -> bool:
        """Call a callback of the system's owner and return True. If the callback raises, the system
        dies of that error, and the result is False."""
        try:
            callback()
        except Exception as error:
            self._die(error)
            return False
        return True

    async def _restart_nodes(self, victims: Collection[str]) -> None:
        plans = wire(self._topology, self._options)
        self.ready |= self._running_node.cut(plans.pop(self._topology.local))
        specs, survivors = self._specs, []
        for child in list(self._children):
            if child.name in victims:
                self._stop_watching_pid(child)
                self._children.replace(specs[child.name], plans[child.name])
            else:
                child.cut(plans[child.name])
                survivors.append(child)
        stall = self._options.stall_timeout
        limits = dict.fromkeys(specs, _RESTART_FACTOR * (stall or _DEFAULT_STALL_SECONDS))
        for name in victims:
            limits[name] = start_limit(self._start_seconds.get(name, 0.0), stall)
        watch = asyncio.ensure_future(kill_late(self._children, limits, self._kill_hung))
        try:
            await self._begin_flow()
        finally:
            watch.cancel()

    def _kill_hung(self, child: ChildProcess, reason: str) -> None:
        """Kill a node that hangs. Its death is reported as a hang and handled like any other."""
        log.error("%s", reason)
        child.hang_description = reason
        child.kill()

    def _stop_watching_pid(self, child: ChildProcess) -> None:
        if child.pidfd >= 0 and self._loop is not None:
            self._loop.remove_reader(child.pidfd)

    def _stalled(self, error: BaseException, node: str) -> None:
        """Handle the watchdog's report that a node has stalled: kill the node or, if it cannot be
        replaced, end the system."""
        child = self._children.by_name.get(node)
        if child is None or not self._options.max_restarts:
            self._die(error)
        else:
            self._kill_hung(child, str(error))

    def _try_recover(self, child: ChildProcess, error: BaseException) -> bool:
        """Record a death and start a recovery. Return False if the system is not running yet or the
        restart budget is exhausted."""
        expected, now = self._running_node.expects_death(), time.monotonic()
        if not self._is_running or not self._deaths.record(
            child.death(), error, now, expected=expected
        ):
            return False
        self._kill_groups(child)
        self._stop_watching()
        if self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recover())
        return True

    def _kill_groups(self, dead: ChildProcess) -> None:
        """Kill every node that belongs to a group, whichever node has died, because such nodes may
        be waiting for one another and cannot stop by themselves. They are replaced, but their
        deaths do not count against the restart budget."""
        for child in self._children:
            if child.group and not child.has_ended:
                child.is_collateral = True
                child.record_end()
                child.kill()
                error = RuntimeFault(
                    f"node {dead.name} has died, so its group {child.group} was ended"
                )
                child.fail_start(error)
                self._deaths.victims.setdefault(child.name, error)

    def actor(self, name: str) -> Actor:
        """Return an actor of the node that runs in this process, by name."""
        return self._running_node.actors[name]

    @property
    def _running_node(self) -> Node:
        assert self._node is not None, "the system was not started"
        return self._node

    def check_usable(self) -> None:
        """Raise `NotUsableHere` unless the process and the event loop are those in which the system
        was started."""
        if os.getpid() != self._pid:
            raise NotUsableHere(
                "the engine was started in another process; start it after the fork, not before"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise NotUsableHere(
                "the engine was started on another event loop; use it on that loop, or start a "
                "second engine"
            )

    @property
    def is_ours(self) -> bool:
        """True if this process started the system. False in a process forked from it."""
        return os.getpid() == self._pid

    @property
    def is_here(self) -> bool:
        """True if the running event loop is the one on which the system was started."""
        return os.getpid() == self._pid and asyncio.get_running_loop() is self._loop

    @property
    def running_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """The loop on which the system was started, if it is not the current one and still runs in
        another thread; otherwise None."""
        loop = self._loop
        if loop is None or os.getpid() != self._pid or self.is_here or not loop.is_running():
            return None
        return loop

    @property
    def dead(self) -> BaseException | None:
        """The error that made the system unusable; None while it is usable."""
        return self._dead

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the child processes that have been started, by node name."""
        return {child.name: child.pid for child in self._children if child.pid}

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of every actor, by actor name. Nodes that do not answer within one
        second are left out."""
        figures = dict(self._running_node.statistics())
        for answer in await self._ask(control.Query("statistics"), 1.0):
            figures |= answer
        return figures

    async def trace(self, since: int = 0) -> list[NodeTrace]:
        """Collect the actors' spans that ended after `since`, in ns of the monotonic clock.

        Each track (timeline row) keeps only its latest spans. Nodes that do not answer within 5
        seconds are left out.
        """
        ours = self._running_node.trace(since)
        return [ours, *await self._ask(control.Query("trace", (since,)), 5.0)]

    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """Return the busy fraction (0 to 1) of each track (timeline row) in each of `bins`
        intervals, by track name.

        The intervals start at `begin` and are `width` long, both in ns of the monotonic clock.
        Nodes that do not answer within one second are left out.
        """
        shares = self._running_node.activity(begin, width, bins)
        for answer in await self._ask(control.Query("activity", (begin, width, bins)), 1.0):
            shares |= answer
        return shares

    async def _ask(self, query: control.Query, seconds: float) -> list[Any]:
        """Send a query to all child processes and return the replies that arrive within
        `seconds`."""
        answers = [answer for child in self._children if (answer := child.ask(query)) is not None]
        if answers:
            await asyncio.wait(answers, timeout=seconds)
        return [answer.result() for answer in answers if answer.done()]

    def _on_message(self, child: ChildProcess, message: Any) -> None:
        """Handle a control message from a child, or None if its channel is closed. Runs on the
        event loop."""
        match message:
            case _ if self._children.by_name.get(child.name) is not child:
                pass  # the child was replaced
            case control.Pong(progress):
                if self._watchdog is not None:
                    self._watchdog.record_reply(child.name, progress)
            case None:  # the channel is closed, and all of its messages have been handled
                self._child_ended(child)
            case _:
                child.on_message(message)

    def _child_ended(self, child: ChildProcess) -> None:
        if child.has_ended or self._children.by_name.get(child.name) is not child:
            return  # already recorded
        child.record_end()
        error = child.fail_start()
        if self._dead is None and not self._closing and not self._try_recover(child, error):
            self._die(error)

    def _child_died(self, child: ChildProcess) -> None:
        """Handle a readable pidfd: the process has exited, but its last message may still be in its
        channel."""
        self._stop_watching_pid(child)
        if not self._closing and self._loop is not None:
            self._loop.call_later(0.02, self._child_ended, child)

    def _local_failed(self, actor: str, error: BaseException) -> None:
        log.error("actor %s failed", actor, exc_info=error)
        failure = RuntimeFault(f"actor {actor} failed: {error!r}")
        failure.__cause__ = error
        self._die(failure)

    def _die(self, error: BaseException) -> None:
        if self._dead is not None or self._closing:
            return
        self._dead = error
        if self._is_running:
            log.error("the system has died: %s%s", error, details(error))
        if self._node is not None:
            self._node.break_edges(str(error))
        self._stop_watching()
        self._children.kill()
        self._on_death(error)

    async def close(self) -> None:
        """Stop the nodes (processes) in reverse order of their start, and wait until all have
        ended.

        Concurrent calls wait for the same shutdown. In a process forked from the one that started
        the system, this does nothing.
        """
        if self._loop is None or os.getpid() != self._pid:
            return
        loop = self.running_elsewhere
        if loop is not None and await run_on(loop, self.close):
            return
        if not self.is_here:
            await asyncio.to_thread(self.end)
            return
        if self._closed is None:
            self._closing = True
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    def end(self) -> None:
        """Stop every node (process) without the event loop, which no longer runs. Blocks until all
        have ended."""
        is_closing_elsewhere = self._closing and self._closed is None
        if os.getpid() != self._pid or is_closing_elsewhere or self._stopped:
            return
        self._closing = True
        self._stop_watching()
        self._children.end_without_loop(self._options.stop_timeout)
        self._stop_node()

    def abandon(self) -> None:
        """Kill every child process without waiting until it has ended. May be called from any
        thread."""
        if self._loop is None or os.getpid() != self._pid or self._closed is not None:
            return
        self._children.kill()
        close_soon(self._loop, self.close, self.end, lambda: self._stopped)

    async def _close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
        self._stop_watching()
        for child in self._children:
            self._stop_watching_pid(child)
        try:
            await self._children.end(self._options.stop_timeout)
        except asyncio.CancelledError:  # the loop ends and cancels its tasks
            self._children.end_without_loop(self._options.stop_timeout)
            raise
        finally:
            self._stop_node()

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _stop_node(self) -> None:
        if not self._stopped:
            self._stopped = True
            if self._node is not None:
                self._node.stop()
            self._children.close()


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
