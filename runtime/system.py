"""The supervisor: starts the nodes of a topology, watches them, ends them.

It lives in the user's process. One library thread starts the children, since the kernel
ties a child's life to the *thread* that started it, and hears their control channels; a
pidfd on the user's loop notices a death. It installs no signal handlers.

Children are started as `python -c`, not through `multiprocessing`'s spawn: that would run
the user's script a second time, demand a `__main__` guard, and leave a resource tracker
behind. Everything a child needs travels over inherited descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime import control
from nanoactor.runtime.actor import Actor, ReadyInfo
from nanoactor.runtime.codec import schema_hashes
from nanoactor.runtime.errors import (
    NodeDied,
    NodeStalled,
    NotUsableHere,
    RuntimeFault,
    SchemaMismatch,
    StartupFailed,
    UnsupportedPlatform,
)
from nanoactor.runtime.node import Node, NodePlan
from nanoactor.runtime.process import GROUP_SIGNALS, occupy_standard_descriptors
from nanoactor.runtime.topology import NodeSpec, Topology
from nanoactor.runtime.tracing import NodeTrace
from nanoactor.runtime.watch import Stall, Watch
from nanoactor.runtime.wiring import Options, wire

log = logging.getLogger("nanoactor.system")

_MOST_UNANSWERED = 64
_LATE = 30.0
"""Seconds after which the log tells for whom a start waits."""
_LAST_WORDS = 0.25
"""Share of the stall timeout that stacks may take to arrive."""


class System:
    """A running topology. Use it from the event loop and the process in which it was started."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        on_death: Callable[[BaseException], None],
        has_work: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_death` is called once, on the loop, when the running system has become useless;
        nodes are watched, with the `stall_timeout` of the options, while `has_work` says so."""
        topology.validate()
        self._topology = topology
        self._options = options
        self._on_death = on_death
        self._has_work = has_work
        self._watch: Watch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._children: dict[str, _ChildProcess] = {}
        self._node: Node | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._thread: _ReaperThread | None = None
        self._dead: BaseException | None = None
        self._closing = False
        self._end: asyncio.Future[None] | None = None
        """The closing, once it has begun."""
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.ready: dict[str, ReadyInfo] = {}
        """What each actor told when it was ready."""

    async def start(self) -> None:
        """Start every node and wait until all are ready.

        Raises what an actor's set-up raised, if its class travels, else `StartupFailed` with
        the name of the actor or node and its traceback. Nothing is left running then.
        """
        if self._loop is not None:
            raise RuntimeFault("a system starts once; make a new one")
        _check_surroundings()
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        late = self._loop.call_later(_LATE, self._tell_late, _LATE)
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
                raise _os_refuses(error) from error
            raise
        finally:
            late.cancel()
        self._begin_watch()

    def _late(self) -> str:
        """The nodes that are not ready, each with the state of its process."""
        late = [c for c in self._children.values() if not (c.is_ready and c.started.done())]
        unready = [child for child in late if not child.is_ready] or late
        return ", ".join(f"{child.name} ({child.condition()})" for child in unready)

    def _tell_late(self, seconds: float) -> None:
        assert self._loop is not None
        if (late := self._late()) and not self._closing and self._dead is None:
            log.warning(
                "not ready after %.0f s: node(s) %s; it is waited for up to %.0f s",
                seconds,
                late,
                self._options.start_timeout,
            )

    async def _start(self) -> None:
        assert self._loop is not None
        occupy_standard_descriptors()
        plans = wire(self._topology, self._options)
        local = plans.pop(self._topology.local)
        self._node = Node(local, self._local_failed)
        specs = {node.name: node for node in self._topology.nodes}
        self._children = {
            name: _ChildProcess(specs[name], plan, self._loop) for name, plan in plans.items()
        }
        if self._children:
            self._thread = _ReaperThread(self._children, self._hear, self._loop)
            self._thread.start()
        self.ready |= self._node.setup()
        for child in self._children.values():
            report = await child.ready
            _check_schema(child.name, report.schema)
            self.ready |= report.actors
        for child in self._children.values():
            self._loop.add_reader(child.pidfd, self._child_died, child)
            child.send(control.Start(self.ready))
        self._node.start(self._loop, self.ready)
        for child in self._children.values():
            await child.started

    def actor(self, name: str) -> Actor:
        """An actor of the local node."""
        assert self._node is not None
        return self._node.actors[name]

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
        """Whether this process has started it, not one from which it was forked."""
        return os.getpid() == self._pid

    @property
    def is_here(self) -> bool:
        """Whether the running loop is the one on which it was started."""
        return os.getpid() == self._pid and asyncio.get_running_loop() is self._loop

    @property
    def running_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """The loop on which it was started, where that is another one and runs."""
        loop = self._loop
        if loop is None or os.getpid() != self._pid or self.is_here or not loop.is_running():
            return None
        return loop

    @property
    def dead(self) -> BaseException | None:
        """Why the system became useless, if it did."""
        return self._dead

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the nodes that are processes of their own."""
        return {name: child.pid for name, child in self._children.items()}

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Every actor's figures, by actor; a node that does not answer in a second is left out."""
        assert self._node is not None
        figures = dict(self._node.statistics())
        for answer in await self._ask("statistics", 1.0):
            figures |= answer
        return figures

    async def trace(self, since: int = 0) -> list[NodeTrace]:
        """What every actor did after a moment of the monotonic clock, in ns, as far back as they
        remember; a node that does not answer in 5 s is left out."""
        assert self._node is not None
        return [self._node.trace(since), *await self._ask("trace", 5.0, since)]

    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """By lane: its busy share in each of `bins` stretches of `width` ns from `begin` on; a
        node that does not answer in a second is left out."""
        assert self._node is not None
        shares = self._node.activity(begin, width, bins)
        for answer in await self._ask("activity", 1.0, begin, width, bins):
            shares |= answer
        return shares

    async def _ask(
        self, what: Literal["statistics", "trace", "activity"], seconds: float, *arguments: int
    ) -> list[Any]:
        """The answers of all nodes that are processes of their own and answer in time."""
        assert self._loop is not None
        pending: dict[int, asyncio.Future[Any]] = {}
        for child in self._children.values():
            if child.unanswered >= _MOST_UNANSWERED:
                continue
            number = next(self._numbers)
            pending[number] = self._queries[number] = self._loop.create_future()
            child.unanswered += 1
            child.send(control.Query(number, what, arguments))
        if pending:
            await asyncio.wait(pending.values(), timeout=seconds)
        for number in pending:
            del self._queries[number]
        return [answer.result() for answer in pending.values() if answer.done()]

    # -- watching -------------------------------------------------------------------------

    def _begin_watch(self) -> None:
        if self._options.stall_timeout is not None and not self._closing:
            self._watch = Watch((*self._children, ""), self._options.stall_timeout)
            self._look()

    def _look(self) -> None:
        """Judge by what was heard, then ask again."""
        assert self._loop is not None
        assert self._watch is not None
        assert self._node is not None
        if self._dead is not None or self._closing:
            return
        self._timer = self._loop.call_later(self._watch.interval, self._look)
        deaf = self._thread is not None and self._thread.is_deaf(self._watch.interval)
        if deaf or not self._has_work():
            self._watch.rest()
            return
        # This process's own node, whose name is not needed: its loop turns, as we are here.
        self._watch.heard("", self._node.progress())
        cpu = {child.name: child.cpu_seconds() for child in self._children.values()}
        stall = self._watch.tick(time.monotonic(), cpu)
        if stall is not None:
            self._timer.cancel()
            self._tell_stall(stall)
            return
        for child in self._children.values():
            child.send(control.Ping())

    def _tell_stall(self, stall: Stall) -> None:
        """Log what everybody is at, then give the system up."""
        assert self._loop is not None
        assert self._options.stall_timeout is not None
        culprit = self._children.get(stall.node)
        where = f"node {stall.node} ({culprit.condition()})" if culprit else "this process"
        error = NodeStalled(f"{where} has stalled: {stall.what}")
        log.error("%s; the stacks of all nodes follow", error)
        ours = control.Log.of_stacks(self._topology.local)
        control.replay(ours, self._topology.local)
        for child in self._children.values():
            child.send(control.TellStacks())
            log.error("node %s: %s", child.name, child.condition())
        self._loop.call_later(_LAST_WORDS * self._options.stall_timeout, self._die, error)

    def _hear(self, child: _ChildProcess, message: Any) -> None:
        """A control message, on the loop."""
        match message:
            case control.Pong(progress):
                if self._watch is not None:
                    self._watch.heard(child.name, progress)
            case control.Ready():
                _resolve(child.ready, message)
            case control.Started():
                _resolve(child.started, None)
            case control.Reply(number, answer):
                child.unanswered -= 1
                if number in self._queries:
                    _resolve(self._queries[number], answer)
            case control.Failed():
                child.failure = message
            case None:
                self._child_ended(child)

    def _child_ended(self, child: _ChildProcess) -> None:
        """The channel closed: everything the child had to say has been heard."""
        error = child.describe_end()
        for future in (child.ready, child.started):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it is raised where start() awaits it, if it still does
        self._die(error)

    def _child_died(self, child: _ChildProcess) -> None:
        """The pidfd is readable: the process is gone, perhaps with a last word in its channel."""
        assert self._loop is not None
        self._loop.remove_reader(child.pidfd)
        if not self._closing:
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
        if self._node is not None:
            self._node.break_off(str(error))
        for child in self._children.values():
            child.kill()
        self._on_death(error)

    async def close(self) -> None:
        """End every node, latest first, and wait until none is left.

        Whoever calls it while it is under way waits for the same end; a process that was
        forked from the one that started the system leaves it alone.
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
        """End every node without the loop, which runs no more; blocks until none is left."""
        if os.getpid() != self._pid or (self._closing and self._end is None):
            return
        self._closing = True
        for child in reversed(self._children.values()):
            child.send(control.Stop())
        # Dropped by a callback on that very thread, it must not wait for itself.
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(self._options.stop_timeout)
            for child in self._children.values():
                child.kill()
            self._thread.join()
        if self._node is not None:
            self._node.stop()
        for child in self._children.values():
            child.close()

    def abandon(self) -> None:
        """End every node though nobody waits for it; from any thread."""
        if self._loop is None or os.getpid() != self._pid or self._end is not None:
            return
        for child in self._children.values():
            child.kill()
        try:
            self._loop.call_soon_threadsafe(self._close_soon)
        except RuntimeError:  # the loop is closed
            self.end()

    def _close_soon(self) -> None:
        self._abandoned = asyncio.ensure_future(self.close())

    async def _close(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        for child in self._children.values():
            if child.pidfd >= 0:
                self._loop.remove_reader(child.pidfd)
        for child in reversed(self._children.values()):
            child.send(control.Stop())
        if self._thread is not None:
            try:
                await asyncio.wait_for(
                    asyncio.shield(self._thread.done), self._options.stop_timeout
                )
            except TimeoutError:
                for child in self._children.values():
                    child.kill()
                await self._thread.done
            self._thread.join()
        if self._node is not None:
            self._node.stop()
        for child in self._children.values():
            child.close()


async def run_on(
    loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Run a coroutine function to its end on the loop of another thread; False where that loop
    stops before."""
    ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), loop))
    while not (await asyncio.wait((ending,), timeout=0.1))[0]:
        if not loop.is_running():
            return False
    await ending
    return True


def _check_surroundings() -> None:
    """Raise `UnsupportedPlatform` for what keeps processes from being started, or heard."""
    if not sys.executable:
        raise UnsupportedPlatform(
            "sys.executable is empty, as in a program that embeds Python: set it to the path of "
            "this environment's Python interpreter before the engine starts"
        )
    if _threads_are_replaced():
        raise UnsupportedPlatform(
            "gevent or eventlet has replaced Python's threads (monkey.patch_all, say), which the "
            "engine's supervisor needs: run the engine in a process that is not patched, as "
            "`nanoactor serve` does"
        )


def _threads_are_replaced() -> bool:
    import _thread

    return _thread.start_new_thread.__module__ != "_thread"


def _os_refuses(error: OSError) -> StartupFailed:
    """What the operating system does not give, as an error of ours."""
    import resource

    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return StartupFailed(f"the operating system refuses what a start needs: {error}")

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return StartupFailed(
        f"too many open files: this process may open {limit}; raise the limit (`ulimit -n`, "
        f"LimitNOFILE= in systemd) to 256 or more ({error})"
    )


def _check_schema(node: str, theirs: Mapping[int, str]) -> None:
    ours = schema_hashes()
    differing = [number for number in theirs if ours.get(number, theirs[number]) != theirs[number]]
    if differing:
        raise SchemaMismatch(
            f"node {node} lays out the messages {differing} differently from this process: "
            "its code is of another version"
        )


def _children_of(pid: int) -> list[int]:
    """Its living children, by whichever thread."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in listed.read_text().split()]
    return found


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


class _ChildProcess:
    """One node in a process of its own, as its parent sees it."""

    def __init__(self, spec: NodeSpec, plan: NodePlan, loop: asyncio.AbstractEventLoop) -> None:
        self.name = spec.name
        self.ready: asyncio.Future[control.Ready] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.failure: control.Failed | None = None
        self.pidfd = -1
        self.unanswered = 0
        """Queries: a node that hangs is not asked again and again, for its channel would fill up
        and hold up this process too."""
        self.process: subprocess.Popen[bytes] | None = None
        self._spec = spec
        self._plan = plan
        self._descriptors = plan.descriptors
        self._lock = threading.Lock()
        ours, self._theirs = socket.socketpair()
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        return self.process.pid if self.process else 0

    @property
    def is_ready(self) -> bool:
        """Whether it reported that its actors are set up."""
        return self.ready.done() and not self.ready.cancelled()

    def spawn(self) -> None:
        """Start the process; runs on the library's thread. Its descriptors are closed here."""
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others too
        program = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from nanoactor.runtime.child import main; main({self._theirs.fileno()})"
        )
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [sys.executable, "-c", program],
                pass_fds=(self._theirs.fileno(), *self._descriptors, *self._spec.descriptors),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._spec.environment},
            )
            self.pidfd = os.pidfd_open(self.process.pid)
        except (OSError, ValueError) as error:
            told = _os_refuses(error) if isinstance(error, OSError) else error
            self.failure = control.Failed.of(self.name, told)
        finally:  # without our copies, the child's end shows at once on ours
            self._let_go()
        level = logging.getLogger("nanoactor").getEffectiveLevel()
        blocked, nice = self._spec.blocked_modules, self._spec.nice
        self.send(control.Bootstrap(self._plan, os.getpid(), level, blocked, nice))

    def send(self, message: Any) -> None:
        """Send on the control channel; a child that is gone is noticed elsewhere."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.send(message)

    def condition(self) -> str:
        """Its process id and what the kernel says of it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return f"pid {self.pid}, gone"
        line = next((line for line in status.splitlines() if line.startswith("State:")), "")
        return f"pid {self.pid}, {line.partition(':')[2].strip()}"

    def cpu_seconds(self) -> float:
        """How long it and its children (compilers, say) have computed; 0 where it is gone."""
        ticks = 0
        for pid in (self.pid, *_children_of(self.pid)):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(field) for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def reap(self, timeout: float | None) -> None:
        """Wait until the process ended, so that it leaves no zombie."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)

    def kill(self) -> None:
        """End it now."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def describe_end(self) -> BaseException:
        """Why it ended, as the error to raise."""
        if self.failure is None:
            code = self.process.poll() if self.process else None
            how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"status {code}"
            return NodeDied(f"node {self.name} (pid {self.pid}) ended unexpectedly: {how}")
        original = self.failure.original()
        described = StartupFailed(f"actor {self.failure.actor} failed:\n{self.failure.trace}")
        if original is None:
            return described
        original.__cause__ = described
        return original

    def _let_go(self) -> None:
        """Close what the child has, or would have had, copies of."""
        self._theirs.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()

    def close(self) -> None:
        """Let go of descriptors."""
        self._let_go()
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class _ReaperThread(threading.Thread):
    """Starts the children, hears what they say, and lives until the last one is reaped."""

    def __init__(
        self,
        children: Mapping[str, _ChildProcess],
        hear: Callable[[_ChildProcess, Any], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # A daemon: where the user's program ends without close(), the children end with it.
        super().__init__(name="nanoactor-supervisor", daemon=True)
        self._children = children
        self._hear = hear
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()
        """Resolved when no child is left."""
        self._open = {child.connection: child for child in children.values()}
        self._replaying_since = 0.0

    def is_deaf(self, seconds: float) -> bool:
        """Whether a logging handler of the user's has held it up for longer than this: then it
        hears nobody's answers."""
        since = self._replaying_since
        return bool(since) and time.monotonic() - since > seconds

    def run(self) -> None:
        """Start, then listen until every channel is closed, then reap."""
        # Children inherit the mask: nothing can reach them before they ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            for child in self._children.values():
                child.spawn()
            while self._open:
                for connection in wait(list(self._open)):
                    assert isinstance(connection, Connection)
                    self._receive(self._open[connection])
        finally:
            for child in self._children.values():
                if self._open:  # this thread failed, and without it nobody hears them
                    child.kill()
                child.reap(None)
            self._tell(_resolve, self.done, None)

    def _receive(self, child: _ChildProcess) -> None:
        try:
            message = child.connection.recv()
        except (EOFError, OSError):
            del self._open[child.connection]
            message = None
            child.reap(1.0)
        if isinstance(message, control.Log):
            self._replaying_since = time.monotonic()
            control.replay(message, child.name)
            self._replaying_since = 0.0
        else:
            self._tell(self._hear, child, message)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the user's loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
