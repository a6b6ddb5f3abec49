"""The supervisor: starts the nodes of a topology, notices their deaths, ends them.

It lives in the user's process and on the user's loop, where a pidfd reports a child's death. It
installs no signal handlers.
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
from nanoactor.runtime.children import ChildProcess, Children, check_surroundings, os_refuses
from nanoactor.runtime.codec import check_schema
from nanoactor.runtime.errors import NotUsableHere, RuntimeFault, StartupFailed
from nanoactor.runtime.node import Node
from nanoactor.runtime.process import occupy_standard_descriptors
from nanoactor.runtime.recovery import Death, Deaths, details, start_limit
from nanoactor.runtime.topology import NodeSpec, Topology
from nanoactor.runtime.tracing import NodeTrace
from nanoactor.runtime.watchdog import Watchdog, end_late
from nanoactor.runtime.wiring import Options, wire

log = logging.getLogger("nanoactor.system")

_LATE = 30.0
"""Seconds after which the log names the nodes that a start waits for."""
_PATIENCE, _STALLED = 2.0, 60.0
"""Limit on a surviving node's restart: a multiple of `stall_timeout`, or of these seconds if there
is none."""
_BURIAL = 5.0
"""Seconds that a process may take to end after it was killed."""


class System:
    """A running topology. Use it from the event loop and the process in which it was started."""

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
        """`on_death` is called once, on the loop, when the running system has become useless; nodes
        are watched, with the `stall_timeout` of the options, while `has_work` returns True.

        When the system recovers from a death, `on_cut` is called with the deaths not yet reported
        to it, perhaps again, and then `on_recovered`: between the two nothing can be sent, and
        messages sent before have not arrived. `on_cut` returns how many of the latest deaths have a
        cause that is gone: they no longer count. `before_restart` is awaited before nodes of these
        names are restarted. If one of them raises, the system dies of that error.
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
        """By node: how often it was replaced."""
        self._start_seconds: dict[str, float] = {}
        """By node: the longest that it took to become ready."""
        self._recovery: asyncio.Task[None] | None = None
        self.recovering: tuple[str, float] | None = None
        """Names of the dead nodes and the recovery's monotonic start time, while one is in
        progress."""
        self.restart_seconds = 0.0
        """Total time spent on recoveries."""
        self._runs = False
        self._watchdog: Watchdog | None = None
        self._children = Children(self._hear)
        self._node: Node | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._dead: BaseException | None = None
        self._closing = False
        self._stopped = False
        self._end: asyncio.Future[None] | None = None
        """Future of the closing, once it has started."""
        self.ready: dict[str, ReadyInfo] = {}
        """Record that each actor published when it was ready."""

    async def start(self) -> None:
        """Start every node and wait until all are ready.

        If an actor's set-up fails, raises its exception if the exception's class is `picklable`,
        else `StartupFailed` with the name of the actor or node and its traceback. In either case
        nothing is left running.
        """
        if self._loop is not None:
            raise RuntimeFault("a system can start only once; create a new one")
        check_surroundings()
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        late = self._loop.call_later(_LATE, self._tell_late)
        try:
            await asyncio.wait_for(self._start(), self._options.start_timeout)
        except TimeoutError:
            waited_for = self._late()
            await self.close()
            raise StartupFailed(
                f"not ready after {self._options.start_timeout:.0f} s: node(s) {waited_for}; "
                "raise start_timeout if the model is large or the disk slow"
            ) from None
        except BaseException as error:
            await self.close()
            if self._dead is not None and error is not self._dead:
                raise self._dead from None  # the first failure; it ended the other nodes
            if isinstance(error, OSError):
                raise os_refuses(error) from error
            raise
        finally:
            late.cancel()
        self._runs = True
        self._watch()

    def _watch(self) -> None:
        timeout = self._options.stall_timeout
        if timeout is not None and self._dead is None and not self._closing:
            self._watchdog = Watchdog(
                self._children, self._running_node, timeout, self._has_work, self._stalled
            )

    def _late(self) -> str:
        """Return the nodes that are not ready, each with the state of its process."""
        late = self._children.late()
        return ", ".join(f"{child.name} ({child.condition()})" for child in late)

    def _tell_late(self) -> None:
        if (late := self._late()) and not self._closing and self._dead is None:
            log.warning(
                "not ready after %.0f s: node(s) %s; waiting up to %.0f s",
                _LATE,
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
        await self._begin()

    def use(self, topology: Topology) -> None:
        """Use another topology of the same shape for nodes started from now on."""
        self._topology = topology

    @property
    def _specs(self) -> dict[str, NodeSpec]:
        return {node.name: node for node in self._topology.nodes}

    async def _begin(self) -> None:
        """Wait until all are ready, and start the message flow."""
        assert self._loop is not None
        waiting = list(self._children)
        reports = await asyncio.gather(*(child.ready for child in waiting))
        for child, report in zip(waiting, reports, strict=True):
            check_schema(child.name, report.schema)
            self.ready |= report.actors
            longest = max(self._start_seconds.get(child.name, 0.0), child.start_seconds)
            self._start_seconds[child.name] = longest
        for child in waiting:  # where one is watched already, nothing changes
            self._loop.add_reader(child.pidfd, self._child_died, child)
        self._children.send(control.Start(self.ready))
        self._running_node.start(self._loop, self.ready)
        await asyncio.gather(*(child.started for child in self._children))

    # -- deaths ---------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Replace dead nodes until none is left; all nodes restart on other edges."""
        begin = time.monotonic()
        while self._deaths.victims and self._dead is None and not self._closing:
            self.recovering = ", ".join(self._deaths.victims), begin
            if self._told(lambda: self._deaths.tell(self._on_cut)):
                await asyncio.sleep(self._deaths.pause())
                await self._replace_victims()
        self._recovery, self.recovering = None, None
        if self._dead is None and not self._closing:
            seconds = time.monotonic() - begin
            self.restart_seconds += seconds
            log.warning("all nodes run again after %.1f s", seconds)
            if self._told(self._on_recovered):
                self._watch()

    async def _replace_victims(self) -> None:
        victims: dict[str, BaseException] = {}
        try:
            await self._ask_user()
            async with asyncio.timeout(self._options.start_timeout):
                await asyncio.gather(*(child.introduced for child in self._children))
                # No await until all survivors are notified: a death recorded before that is among
                # these, and one recorded later fails the awaits below.
                victims = self._deaths.take_victims()
                await self._begin_anew(victims)
        except TimeoutError:
            await self._end_all_late(bool(victims))
        except Exception as error:
            if not victims or not self._deaths.victims:  # no other death: a retry is no use
                self._die(os_refuses(error) if isinstance(error, OSError) else error)

    async def _ask_user(self) -> None:
        """Call the user's handler for nodes that cannot restart."""
        asked: set[str] = set()
        while self._before_restart is not None and (new := self._deaths.victims.keys() - asked):
            asked |= new
            await self._before_restart(new)

    async def _end_all_late(self, may_go_on: bool) -> None:
        """End the nodes that are late when the time for a restart is up, so that they are replaced
        like any that die."""
        late, limit = self._children.late(), self._options.start_timeout
        told = f"not ready again after {limit:.0f} s: node(s) {self._late()}"
        for child in late if may_go_on else ():
            self._give_up_on(child, told)
        if not may_go_on or not await self._children.have_ended(late, _BURIAL):
            self._die(StartupFailed(told))

    def _told(self, what: Callable[[], None]) -> bool:
        """Call `what`, a callback of the system's user; return False if it raises."""
        try:
            what()
        except Exception as error:
            self._die(error)
            return False
        return True

    async def _begin_anew(self, victims: Collection[str]) -> None:
        plans = wire(self._topology, self._options)
        self.ready |= self._running_node.cut(plans.pop(self._topology.local))
        specs, survivors = self._specs, []
        for child in list(self._children):
            if child.name in victims:
                self._forget(child)
                self._children.replace(specs[child.name], plans[child.name])
            else:
                child.cut(plans[child.name])
                survivors.append(child)
        stall = self._options.stall_timeout
        limits = dict.fromkeys(specs, _PATIENCE * (stall or _STALLED))
        for name in victims:
            limits[name] = start_limit(self._start_seconds.get(name, 0.0), stall)
        watch = asyncio.ensure_future(end_late(self._children, limits, self._give_up_on))
        try:
            await self._begin()
        finally:
            watch.cancel()

    def _give_up_on(self, child: ChildProcess, why: str) -> None:
        """End a node that hangs; its death is reported as a hang, and recovered from."""
        log.error("%s", why)
        child.hangs = why
        child.kill()

    def _forget(self, child: ChildProcess) -> None:
        if child.pidfd >= 0 and self._loop is not None:
            self._loop.remove_reader(child.pidfd)

    def _stalled(self, error: BaseException, node: str) -> None:
        """Handle the watchdog's report that a node has stalled."""
        child = self._children.by_name.get(node)
        if child is None or not self._options.max_restarts:
            self._die(error)
        else:
            self._give_up_on(child, str(error))

    def _is_made_good(self, child: ChildProcess, error: BaseException) -> bool:
        """Record a death, and start to recover from it if possible."""
        expected, now = self._running_node.expects_death(), time.monotonic()
        if not self._runs or not self._deaths.note(child.death(), error, now, expected=expected):
            return False
        self._end_groups(child)
        self._stop_watching()
        if self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recover())
        return True

    def _end_groups(self, dead: ChildProcess) -> None:
        """End the other nodes of a dead node's group at once, as they cannot stop by themselves;
        they are not at fault."""
        for child in self._children:
            if child.group and not child.is_over:
                child.is_innocent = True
                child.note_end()
                child.kill()
                error = RuntimeFault(f"node {dead.name} has died, and group {child.group} with it")
                child.give_up(error)
                self._deaths.victims.setdefault(child.name, error)

    def actor(self, name: str) -> Actor:
        """Return an actor of the local node."""
        return self._running_node.actors[name]

    @property
    def _running_node(self) -> Node:
        assert self._node is not None, "the system was not started"
        return self._node

    def check_usable(self) -> None:
        """Raise `NotUsableHere` in a forked process or on another event loop."""
        if os.getpid() != self._pid:
            raise NotUsableHere(
                "the engine was started in another process; start one after the fork, not before"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise NotUsableHere(
                "the engine was started on another event loop; use it there, or start a second one"
            )

    @property
    def is_ours(self) -> bool:
        """Return True if this process started the system, rather than a process that it was forked
        from."""
        return os.getpid() == self._pid

    @property
    def is_here(self) -> bool:
        """Return True if the running loop is the one that started the system."""
        return os.getpid() == self._pid and asyncio.get_running_loop() is self._loop

    @property
    def running_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop on which it was started, if that is another one and runs."""
        loop = self._loop
        if loop is None or os.getpid() != self._pid or self.is_here or not loop.is_running():
            return None
        return loop

    @property
    def dead(self) -> BaseException | None:
        """Return the error that made the system unusable, if there was one."""
        return self._dead

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids of the nodes with processes of their own, as far as they have been
        started."""
        return {child.name: child.pid for child in self._children if child.pid}

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Return every actor's figures, by actor; a node that does not answer in a second is left
        out."""
        figures = dict(self._running_node.statistics())
        for answer in await self._ask(control.Query("statistics"), 1.0):
            figures |= answer
        return figures

    async def trace(self, since: int = 0) -> list[NodeTrace]:
        """Collect the actors' spans after `since`, in ns of the monotonic clock, as far back as
        they are kept; a node that does not answer in 5 s is left out."""
        ours = self._running_node.trace(since)
        return [ours, *await self._ask(control.Query("trace", (since,)), 5.0)]

    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """Return, by track, its busy share in each of `bins` intervals of `width` ns from `begin`
        on; a node that does not answer in a second is left out."""
        shares = self._running_node.activity(begin, width, bins)
        for answer in await self._ask(control.Query("activity", (begin, width, bins)), 1.0):
            shares |= answer
        return shares

    async def _ask(self, query: control.Query, seconds: float) -> list[Any]:
        """Return the replies of all nodes with processes of their own that reply in time."""
        answers = [answer for child in self._children if (answer := child.ask(query)) is not None]
        if answers:
            await asyncio.wait(answers, timeout=seconds)
        return [answer.result() for answer in answers if answer.done()]

    def _hear(self, child: ChildProcess, message: Any) -> None:
        """Handle a control message; runs on the event loop."""
        match message:
            case _ if self._children.by_name.get(child.name) is not child:
                pass  # it was replaced
            case control.Pong(progress):
                if self._watchdog is not None:
                    self._watchdog.heard(child.name, progress)
            case None:  # the channel is closed: everything that it had to say has been heard
                self._child_ended(child)
            case _:
                child.hear(message)

    def _child_ended(self, child: ChildProcess) -> None:
        if child.is_over or self._children.by_name.get(child.name) is not child:
            return  # that is known
        child.note_end()
        error = child.give_up()
        if self._dead is None and not self._closing and not self._is_made_good(child, error):
            self._die(error)

    def _child_died(self, child: ChildProcess) -> None:
        """Handle a readable pidfd: the process is gone, perhaps with a last message in its
        channel."""
        self._forget(child)
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
        if self._runs:
            log.error("the system has died: %s%s", error, details(error))
        if self._node is not None:
            self._node.break_off(str(error))
        self._stop_watching()
        self._children.kill()
        self._on_death(error)

    async def close(self) -> None:
        """End every node, latest first, and wait until none is left.

        A concurrent call waits for the same end; in a process that was forked from the one that
        started the system it does nothing.
        """
        if self._loop is None or os.getpid() != self._pid:
            return
        loop = self.running_elsewhere
        if loop is not None and await run_on(loop, self.close):
            return
        if not self.is_here:
            await asyncio.to_thread(self.end)
            return
        if self._end is None:
            self._closing = True
            self._end = asyncio.ensure_future(self._close())
        await asyncio.shield(self._end)

    def end(self) -> None:
        """End every node without the loop, which no longer runs; blocks until none is left."""
        waits = self._closing and self._end is None
        if os.getpid() != self._pid or waits or self._stopped:
            return
        self._closing = True
        self._stop_watching()
        self._children.end_without_loop(self._options.stop_timeout)
        self._stop_node()

    def abandon(self) -> None:
        """End every node without waiting for it; from any thread."""
        if self._loop is None or os.getpid() != self._pid or self._end is not None:
            return
        self._children.kill()
        close_soon(self._loop, self.close, self.end, lambda: self._stopped)

    async def _close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
        self._stop_watching()
        for child in self._children:
            self._forget(child)
        try:
            await self._children.end(self._options.stop_timeout)
        except asyncio.CancelledError:  # the loop ends, and with it what waits on it
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
    """Run a coroutine function to its end on the loop of another thread; return False if that loop
    stops first."""
    ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), loop))
    while not (await asyncio.wait((ending,), timeout=0.1))[0]:
        if not loop.is_running():
            return False
    await ending
    return True
