"""Recoveries from the deaths of nodes (processes): dead nodes are replaced, and the actors of all
other nodes restart. The bookkeeping is in `runtime.recovery`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from nanoactor.runtime.children import ChildProcess, resource_error
from nanoactor.runtime.errors import RuntimeFault, StartupFailed
from nanoactor.runtime.nodes import Nodes
from nanoactor.runtime.recovery import Death, Deaths, start_limit
from nanoactor.runtime.watchdog import kill_hung, kill_late
from nanoactor.runtime.wiring import Options

log = logging.getLogger("nanoactor.system")

_RESTART_FACTOR, _DEFAULT_STALL_SECONDS = 2.0, 60.0
"""A surviving node may take `_RESTART_FACTOR` times `stall_timeout` to restart. If `stall_timeout`
is None, `_DEFAULT_STALL_SECONDS` is used instead."""
_KILL_SECONDS = 5.0
"""Seconds within which a killed process must have ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryCallbacks:
    """Functions of a system's owner that run around a recovery; see `System.__init__`."""

    on_cut: Callable[[Sequence[Death]], int]
    on_recovered: Callable[[], None]
    before_restart: Callable[[Collection[str]], Awaitable[None]] | None


class Recoveries:
    """The recoveries of a running system: the current one, if any, and figures of all. Its
    `Supervisor` reports deaths to it."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        callbacks: RecoveryCallbacks,
        fail: Callable[[BaseException], None],
        resume: Callable[[], None],
    ) -> None:
        """`fail` is called with the error if a recovery fails, and `resume` after the callbacks if
        it succeeds."""
        self._nodes = nodes
        self._options = options
        self._callbacks = callbacks
        self._fail = fail
        self._resume = resume
        self._deaths = Deaths(options.max_restarts, options.restart_window)
        self.restarts: Mapping[str, int] = self._deaths.restarts
        """Number of times that each node was replaced, by node name."""
        self.current: tuple[str, float] | None = None
        """(names of the dead nodes, monotonic start time in seconds) of the current recovery; None
        if there is none."""
        self.seconds = 0.0
        """Total time in seconds that was spent on recoveries."""
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self, child: ChildProcess, error: BaseException) -> bool:
        """Record a death and start a recovery, unless one is under way, which then replaces this
        node, too. Return False if the restart budget is exhausted."""
        expected, now = self._nodes.own.expects_death(), time.monotonic()
        if not self._deaths.record(child.death(), error, now, expected=expected):
            return False
        self._kill_groups(child)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return True

    def stop(self) -> None:
        """Replace no more nodes, because the system has died or is being closed."""
        self._is_over = True

    def cancel(self) -> None:
        """Cancel the current recovery."""
        if self._task is not None:
            self._task.cancel()

    def _kill_groups(self, dead: ChildProcess) -> None:
        """Kill every node that belongs to a group, whichever node has died, because such nodes may
        be waiting for one another and cannot stop by themselves. They are replaced, but their
        deaths do not count against the restart budget."""
        for child in self._nodes.children:
            if child.group and not child.has_ended:
                child.is_collateral = True
                child.record_end()
                child.kill()
                error = RuntimeFault(
                    f"node {dead.name} has died, so its group {child.group} was ended"
                )
                child.fail_start(error)
                self._deaths.victims.setdefault(child.name, error)

    async def _run(self) -> None:
        """Replace dead nodes (processes) until none is left. Each attempt restarts the actors of
        all nodes with new channels between them."""
        begin = time.monotonic()
        while self._deaths.victims and not self._is_over:
            self.current = ", ".join(self._deaths.victims), begin
            if self._call(lambda: self._deaths.report(self._callbacks.on_cut)):
                await asyncio.sleep(self._deaths.delay())
                await self._replace_victims()
        self._task, self.current = None, None
        if not self._is_over:
            seconds = time.monotonic() - begin
            self.seconds += seconds
            log.warning("all nodes are running again after %.1f s", seconds)
            if self._call(self._callbacks.on_recovered):
                self._resume()

    def _call(self, callback: Callable[[], None]) -> bool:
        """Call a callback of the system's owner and return True. If the callback raises, the system
        dies of that error, and the result is False."""
        try:
            callback()
        except Exception as error:
            self._fail(error)
            return False
        return True

    async def _replace_victims(self) -> None:
        victims: dict[str, BaseException] = {}
        try:
            await self._call_before_restart()
            async with asyncio.timeout(self._options.start_timeout):
                await asyncio.gather(*(child.bootstrapped for child in self._nodes.children))
                # No await until all survivors are notified: a death recorded earlier is among these
                # victims, and one recorded later makes the awaits below fail.
                victims = self._deaths.pop_victims()
                await self._restart_nodes(victims)
        except TimeoutError:
            await self._kill_all_late(bool(victims))
        except Exception as error:
            if not victims or not self._deaths.victims:  # no other death, so a retry would not help
                self._fail(resource_error(error) if isinstance(error, OSError) else error)

    async def _call_before_restart(self) -> None:
        """Await `before_restart` with the names of all victims, including nodes that die in the
        meantime."""
        before_restart, notified = self._callbacks.before_restart, set[str]()
        while before_restart is not None and (new := self._deaths.victims.keys() - notified):
            notified |= new
            await before_restart(new)

    async def _restart_nodes(self, victims: Collection[str]) -> None:
        self._nodes.cut(victims)
        watch = asyncio.ensure_future(kill_late(self._nodes.children, self._limits(victims)))
        try:
            await self._nodes.begin_flow()
        finally:
            watch.cancel()

    def _limits(self, victims: Collection[str]) -> dict[str, float]:
        """Return the time in seconds within which each node must restart, by node name."""
        stall = self._options.stall_timeout
        limits = dict.fromkeys(
            self._nodes.specs, _RESTART_FACTOR * (stall or _DEFAULT_STALL_SECONDS)
        )
        for name in victims:
            limits[name] = start_limit(self._nodes.start_seconds.get(name, 0.0), stall)
        return limits

    async def _kill_all_late(self, can_continue: bool) -> None:
        """Kill the nodes that are not ready when the restart timeout expires. They are then
        replaced like any dead node.

        The system dies if `can_continue` is False or if one of these nodes does not end.
        """
        late, limit = self._nodes.children.pending(), self._options.start_timeout
        message = (
            f"not ready again after {limit:.0f} s: the engine waited for node(s) "
            f"{self._nodes.describe_pending()}"
        )
        for child in late if can_continue else ():
            kill_hung(child, message)
        if not can_continue or not await self._nodes.children.wait_ended(late, _KILL_SECONDS):
            self._fail(StartupFailed(message))
