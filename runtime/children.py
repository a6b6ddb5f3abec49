"""The child processes of nodes as seen by their parent: starting, messaging and reaping.

One thread of the library starts all children, because the kernel ties a child's life to the
*thread* that started it. The same thread reads their control channels.

Children are started as `python -c`, not by `multiprocessing`'s spawn method. Spawn would run the
user's script a second time, require a `__main__` guard, and leave a resource tracker running.
Everything that a child needs reaches it over inherited descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from nanoactor.runtime import control
from nanoactor.runtime.errors import NodeDied, NodeStalled, StartupFailed, UnsupportedPlatform
from nanoactor.runtime.node import NodePlan
from nanoactor.runtime.process import GROUP_SIGNALS, interpreter, working_directory
from nanoactor.runtime.recovery import Death
from nanoactor.runtime.topology import NodeSpec

log = logging.getLogger("nanoactor.runtime")

_MAX_UNANSWERED_QUERIES = 64
_SEND_SECONDS = 5
"""Seconds for which sending a message may block if a child's control channel is full."""
_EXIT_SECONDS = 0.1
"""Seconds that a process may take to exit after its last message."""
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGQUIT, *GROUP_SIGNALS})
"""Signals that do not point to a fault of the program: people send them, or the kernel does when
memory runs out."""


class Children:
    """All child processes of a system, and the thread that starts them, reads their messages, and
    runs until the last one is reaped. There are no children until `launch` is called."""

    def __init__(self) -> None:
        self.by_name: dict[str, ChildProcess] = {}
        self._loop: asyncio.AbstractEventLoop
        self._on_message: Callable[[ChildProcess, Any], None]
        self._thread: threading.Thread | None = None
        self._all_reaped: asyncio.Future[None]
        """Future that resolves when no child is left."""
        self._open: dict[Any, ChildProcess] = {}
        """Children whose channels are open, by connection."""
        self._replaying_since = 0.0
        self._wake: tuple[Connection, ...] = ()
        """Socket pair that wakes the thread when a child must be started or the thread must end."""
        self._to_start: deque[ChildProcess] = deque()
        self._to_reap: deque[ChildProcess] = deque()
        self.is_ending = False
        """True once the children are being stopped or killed."""

    def __iter__(self) -> Iterator[ChildProcess]:
        """Iterate over the children in the order in which they are started."""
        return iter(self.by_name.values())

    def launch(
        self,
        specs: Mapping[str, NodeSpec],
        plans: Mapping[str, NodePlan],
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[ChildProcess, Any], None],
    ) -> None:
        """Start a child process for each plan. `specs` and `plans` are keyed by node name. Raises
        `StartupFailed` if no thread can be started.

        `on_message(child, message)` is called on the loop for each message of a child. The message
        is None once the child's channel is closed.
        """
        self._loop, self._all_reaped, self._on_message = loop, loop.create_future(), on_message
        self.by_name = {name: ChildProcess(specs[name], plan, loop) for name, plan in plans.items()}
        self._to_start.extend(self)
        if self.by_name:
            self._wake = tuple(Connection(end.detach()) for end in socket.socketpair())
            # A daemon thread: if the user's program ends without close(), the children end, too.
            thread = threading.Thread(target=self._run, name="nanoactor-supervisor", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no more threads
                raise StartupFailed(
                    "the operating system refused a resource that is needed to start the "
                    f"engine: {error}"
                ) from error
            self._thread = thread

    def _run(self) -> None:
        """Start the children and receive their messages. Reap the children once the end was
        requested and every channel is closed."""
        # Children inherit the mask, so no such signal reaches them before they ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            self._start_all()
            while self._open or not self.is_ending:
                for connection in wait([*self._open, self._wake[1]]):
                    if connection is self._wake[1]:
                        self._wake[1].recv_bytes()
                    elif connection in self._open:
                        self._receive(self._open[connection])
                self._start_all()
        except Exception as error:  # whatever waits for a child must be notified
            log.exception("the supervisor of the engine's processes has failed")
            for child in self._open.values():
                child.failure = child.failure or control.Failed.of("supervisor", error)
        finally:
            orphaned = list(self._open.values())
            for child in self:
                if orphaned:  # this thread failed, and no other reads their messages
                    child.kill()
                child.reap(None)
            for child in orphaned:
                self._call_on_loop(self._on_message, child, None)
            self._call_on_loop(_resolve, self._all_reaped, None)

    def _start_all(self) -> None:
        while self._to_reap:
            child = self._to_reap.popleft()
            self._open.pop(child.connection, None)
            child.reap(None)
            child.close()
        while self._to_start:
            child = self._to_start.popleft()
            self._open[child.connection] = child
            child.spawn()
            self._call_on_loop(_resolve, child.bootstrapped, None)

    def _wake_thread(self) -> None:
        if self._wake:
            with contextlib.suppress(OSError):
                self._wake[0].send_bytes(b"!")

    def replace(self, spec: NodeSpec, plan: NodePlan) -> None:
        """Start a new process for a node whose process has died. Kills the old process if it still
        runs."""
        old, new = self.by_name[spec.name], ChildProcess(spec, plan, self._loop)
        old.kill()
        self.by_name[spec.name] = new
        self._to_reap.append(old)
        self._to_start.append(new)
        self._wake_thread()

    def _receive(self, child: ChildProcess) -> None:
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
            self._call_on_loop(self._on_message, child, message)

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the user's loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def is_blocked(self, seconds: float) -> bool:
        """Return True if a logging handler of the user has blocked the thread that reads the
        children's messages for longer than `seconds`."""
        since = self._replaying_since
        return bool(since) and time.monotonic() - since > seconds

    def pending(self) -> list[ChildProcess]:
        """Return the children that startup waits for: those whose actors are not set up or, once
        all are ready, those that have not started to receive messages."""
        unready = [child for child in self if not child.is_ready]
        return unready or [child for child in self if not child.started.done()]

    async def wait_ended(self, children: Sequence[ChildProcess], seconds: float) -> bool:
        """Wait up to `seconds` until the ends of these children are recorded. Return False on
        timeout."""
        if children:
            await asyncio.wait([child.end_recorded for child in children], timeout=seconds)
        return all(child.has_ended for child in children)

    def send(self, message: Any) -> None:
        """Send a message to all children."""
        for child in self:
            child.send(message)

    def kill(self) -> None:
        """Kill all children at once, and make the thread that reads their messages end."""
        self._end_thread()
        for child in self:
            child.kill()

    def _end_thread(self) -> None:
        self.is_ending = True
        self._wake_thread()

    def _stop(self) -> None:
        self._end_thread()
        for child in reversed(self.by_name.values()):
            child.send(control.Stop())

    async def end(self, seconds: float) -> None:
        """Stop the children in reverse order of their start, kill those that take longer than
        `seconds`, and wait until none is left."""
        self._stop()
        if self._thread is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._all_reaped), seconds)
            except TimeoutError:
                self.kill()
                await self._all_reaped
            self._thread.join()

    def end_without_loop(self, seconds: float) -> None:
        """Stop the children like `end`, but without the event loop, which no longer runs. Blocks
        until no child is left."""
        self._stop()
        # If a callback on that very thread drops the system, the thread must not join itself.
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(seconds)
            self.kill()
            self._thread.join()

    def close(self) -> None:
        """Close the descriptors of all children and of the socket pair."""
        for child in self:
            child.close()
        for end in self._wake:
            end.close()
        self._wake = ()


class ChildProcess:
    """A node in its own process, as the parent sees it: its state, its pending queries, and its
    control channel."""

    def __init__(self, spec: NodeSpec, plan: NodePlan, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.group = spec.name, spec.group
        self.ready: asyncio.Future[control.Ready] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.failure: control.Failed | None = None
        self.hang_description = ""
        """Description of the hang for which the process is being killed; empty if it did not
        hang."""
        self.is_collateral = False
        """True if the process is being killed only because another node of its group has died."""
        self._started_at = 0.0
        self.start_seconds = 0.0
        """Seconds that the process took to become ready; 0 until it is ready."""
        self.end_recorded: asyncio.Future[None] = loop.create_future()
        """Future that resolves once the end of the process was recorded."""
        self.pidfd = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.bootstrapped: asyncio.Future[None] = loop.create_future()
        """Future that resolves once the `Bootstrap` message was sent. No other message may precede
        it."""
        self._pending_replies: deque[asyncio.Future[Any]] = deque()
        """Futures of pending queries; replies come in the order of the queries."""
        self._spec = spec
        self._plan = plan
        self._descriptors = plan.descriptors
        self._lock = threading.Lock()
        ours, self._theirs = socket.socketpair()
        # A hanging child must not block this process when its channel eventually fills up.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Process id; 0 until the process is started."""
        return self.process.pid if self.process else 0

    @property
    def is_ready(self) -> bool:
        """Return True if the child has reported that its actors are set up."""
        return self.ready.done() and not self.ready.cancelled()

    def spawn(self) -> None:
        """Start the process and close this process's copies of the child's descriptors. Runs on the
        thread of `Children`. A failure is stored in `failure`, not raised."""
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
        self._started_at = time.monotonic()
        program = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from nanoactor.runtime.child import main; main({self._theirs.fileno()})"
        )
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [interpreter(), "-c", program],
                cwd=working_directory(),
                pass_fds=(self._theirs.fileno(), *self._descriptors, *self._spec.descriptors),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._spec.environment},
            )
            self.pidfd = os.pidfd_open(self.process.pid)
        except (OSError, ValueError) as error:
            cause = resource_error(error) if isinstance(error, OSError) else error
            self.failure = control.Failed.of(self.name, cause)
        finally:  # without our copies, our end reports at once that the child has ended
            self._close_inherited()
        level = logging.getLogger("nanoactor").getEffectiveLevel()
        blocked, nice = self._spec.blocked_modules, self._spec.nice
        self.send(control.Bootstrap(self._plan, os.getpid(), level, blocked, nice))

    def send(self, message: Any) -> None:
        """Send a message on the control channel. Errors are ignored: the death of a child is
        detected by other means."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.send(message)

    def on_message(self, message: Any) -> None:
        """Update the state according to a message from the child. Runs on the loop."""
        match message:
            case control.Ready():
                self.start_seconds = self.start_seconds or time.monotonic() - self._started_at
                _resolve(self.ready, message)
            case control.Started():
                _resolve(self.started, None)
            case control.Reply(answer):
                _resolve(self._pending_replies.popleft(), answer)
            case control.Failed():
                self.failure = message

    def cut(self, plan: NodePlan) -> None:
        """Make the child restart its actors with new channels between them, described by `plan`.

        `ready` and `started` become new futures, which the restart resolves.
        """
        loop = asyncio.get_running_loop()
        self.ready, self.started = loop.create_future(), loop.create_future()
        try:
            with self._lock:
                self.connection.send(control.Cut(plan))
                control.send_descriptors(self.connection, plan.descriptors)
        except OSError:  # the child is gone, or hangs and has read nothing for a long time
            self.kill()
        finally:
            for descriptor in plan.descriptors:
                os.close(descriptor)

    def ask(self, query: control.Query) -> asyncio.Future[Any] | None:
        """Send a query and return a future for the reply.

        Returns None if the process has not been started or if 64 queries are unanswered. More
        queries would fill the channel of a hanging node and block this process, too.
        """
        if len(self._pending_replies) >= _MAX_UNANSWERED_QUERIES or not self.bootstrapped.done():
            return None
        answer = asyncio.get_running_loop().create_future()
        self._pending_replies.append(answer)
        self.send(query)
        return answer

    def condition(self) -> str:
        """Return a description of the process for humans: its id and the state that the kernel
        reports."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return f"pid {self.pid}, no longer running"
        line = next((line for line in status.splitlines() if line.startswith("State:")), "")
        return f"pid {self.pid}, {line.partition(':')[2].strip()}"

    def cpu_seconds(self) -> float:
        """Return the CPU time in seconds that the process and its children (such as compilers) have
        used; 0 if the process is gone."""
        ticks = 0
        for pid in (self.pid, *_children_of(self.pid)):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(field) for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def reap(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds (None: forever) for the process to end, so that it leaves no
        zombie."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)

    @property
    def has_ended(self) -> bool:
        """Return True if the end of the process was recorded."""
        return self.end_recorded.done()

    def record_end(self) -> None:
        """Record that the process has ended, which resolves the future `end_recorded`."""
        _resolve(self.end_recorded, None)

    def kill(self) -> None:
        """Kill the process if it is running."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def fail_start(self, cause: BaseException | None = None) -> BaseException:
        """Fail the futures that a pending start awaits. Returns the error they fail with: `cause`
        or, if that is None, an error that describes the end of the process."""
        error = cause or self._describe_end()
        for future in (self.ready, self.started):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as retrieved, as the start may no longer await it
        return error

    def death(self) -> Death:
        """Return a record of the node's death and its cause. The process must have ended."""
        if self.hang_description:
            return Death(self.name, "it hung", is_evidence=True)
        if self.is_collateral:
            return Death(self.name, "it was killed together with its group", is_evidence=False)
        if self.failure is not None:
            return Death(self.name, self.failure.summary, not self.failure.is_resource_failure)
        code = self._exit_code()
        is_external = code is not None and -code in _EXTERNAL_SIGNALS
        return Death(self.name, _describe_exit(code), not is_external)

    def _exit_code(self) -> int | None:
        """Return the exit code as in `Popen.returncode`, or None if the process does not end within
        0.1 seconds.

        `Popen.poll` does not return it while another thread waits for the process.
        """
        if self.process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_EXIT_SECONDS)
        return None

    def _describe_end(self) -> BaseException:
        if self.hang_description:
            return NodeStalled(self.hang_description)
        if self.failure is None:
            exit_description = _describe_exit(self._exit_code())
            return NodeDied(
                f"node {self.name} (pid {self.pid}) ended unexpectedly: {exit_description}"
            )
        original = self.failure.original()
        described = StartupFailed(self.failure.summary)
        described.add_note(f"In the process of node {self.name}:\n{self.failure.trace}")
        if original is None:
            return described
        original.__cause__ = described
        return original

    def _close_inherited(self) -> None:
        """Close this process's copies of the descriptors that the child inherits."""
        self._theirs.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()

    def close(self) -> None:
        """Close the control channel, the descriptors for the child, and the pidfd."""
        self._close_inherited()
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "its control channel was closed, but the process is still running"
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def check_environment() -> None:
    """Raise `UnsupportedPlatform` if this environment cannot start child processes or receive their
    messages."""
    interpreter()
    if _threads_are_replaced():
        raise UnsupportedPlatform(
            "gevent or eventlet has replaced Python's threads (for example, by "
            "monkey.patch_all), which the engine's supervisor needs; run the engine in a "
            "process that is not patched, for example with `nanoactor serve`"
        )


def _threads_are_replaced() -> bool:
    import _thread

    return _thread.start_new_thread.__module__ != "_thread"


def resource_error(error: OSError) -> StartupFailed:
    """Return a `StartupFailed` that names the resource refused by the operating system and, for
    open files, how to raise the limit."""
    import resource

    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return StartupFailed(
            f"the operating system refused a resource that is needed to start the engine: {error}"
        )

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return StartupFailed(
        f"too many open files: this process may open at most {limit}; raise the limit (`ulimit "
        f"-n`, LimitNOFILE= in systemd) to 256 or more ({error})"
    )


def _children_of(pid: int) -> list[int]:
    """Return the process ids of the children of `pid` that are alive, regardless of the thread that
    started them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # for example, if no descriptors are left
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in path.read_text().split()]
    return found


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
