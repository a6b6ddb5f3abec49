"""The watchdog, which pings every node (process) at intervals and reports a stalled one.

`runtime.stall` decides whether a node has stalled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from nanoactor.runtime import control
from nanoactor.runtime.actor import Progress
from nanoactor.runtime.children import ChildProcess, Children
from nanoactor.runtime.errors import NodeStalled
from nanoactor.runtime.node import Node
from nanoactor.runtime.recovery import StartWatch
from nanoactor.runtime.stall import Stall, StallDetector

log = logging.getLogger("nanoactor.system")

_STACKS_FRACTION = 0.25
"""Fraction of the stall timeout that the nodes have for logging their stacks."""


def kill_hung(child: ChildProcess, reason: str) -> None:
    """Kill a node that hangs. Its death is reported as a hang and handled like any other."""
    log.error("%s", reason)
    child.hang_description = reason
    child.kill()


async def kill_late(children: Children, limits: Mapping[str, float]) -> None:
    """Kill each child process that does not restart within its limit. Nothing else detects a
    process that hangs during a restart. `limits` are in seconds, by node name. While a process uses
    its CPU, only a tenth of the time counts.

    Runs until it is cancelled.
    """
    watch, before = StartWatch(limits), time.monotonic()
    while True:
        await asyncio.sleep(watch.interval)
        now = time.monotonic()
        cpu = {child.name: child.cpu_seconds() for child in children.pending()}
        for name in watch.tick(now - before, cpu):
            child = children.by_name[name]
            kill_hung(child, f"node {name} ({child.condition()}) has not restarted in time")
        before = now


class Watchdog:
    """Periodic check of all nodes (processes) for stalls. It runs on the event loop from its
    creation until `stop` is called."""

    def __init__(
        self,
        children: Children,
        node: Node,
        timeout: float,
        has_work: Callable[[], bool],
        give_up: Callable[[NodeStalled, str], None],
    ) -> None:
        """`node` is this process's own node. `timeout` is in seconds. Nodes are checked only while
        `has_work` returns True.

        `give_up` is called once, with the error and the name of the stalled node; the name is empty
        for this process's own node. Before the call, all nodes have had time to log their stacks.
        """
        self._children = children
        self._node = node
        self._timeout = timeout
        self._has_work = has_work
        self._give_up = give_up
        self._detector = StallDetector((*children.by_name, ""), timeout)
        self._loop = asyncio.get_running_loop()
        self._check()

    def stop(self) -> None:
        """Cancel the periodic checks."""
        self._timer.cancel()

    def record_reply(self, node: str, progress: Mapping[str, Progress]) -> None:
        """Record a node's reply to a ping: the progress of its work, by actor name."""
        self._detector.record_reply(node, progress)

    def _check(self) -> None:
        try:
            stall = self._judge()
        except OSError as refusal:  # only this check failed; the next may succeed
            log.warning("the engine's processes could not be inspected: %s", refusal)
            stall = None
        if stall is None:
            self._timer = self._loop.call_later(self._detector.interval, self._check)
        else:
            error = self._report(stall)
            delay = _STACKS_FRACTION * self._timeout
            self._timer = self._loop.call_later(delay, self._give_up, error, stall.node)

    def _judge(self) -> Stall | None:
        """Return the stall that the replies so far show. If there is none, ping all nodes and
        return None."""
        if self._children.is_blocked(self._detector.interval) or not self._has_work():
            self._detector.reset()
            return None
        # This process's own node has the empty name. Its loop runs, as it runs this code.
        self._detector.record_reply("", self._node.progress())
        cpu = {child.name: child.cpu_seconds() for child in self._children}
        stall = self._detector.tick(time.monotonic(), cpu)
        if stall is None:
            self._children.send(control.Ping())
        return stall

    def _report(self, stall: Stall) -> NodeStalled:
        """Log the state and the stacks of all nodes. Return the error that describes the stall."""
        culprit = self._children.by_name.get(stall.node)
        where = f"node {stall.node} ({culprit.condition()})" if culprit else "this process"
        error = NodeStalled(f"{where} has stalled: {stall.symptom}")
        log.error("%s; the stacks of all nodes follow", error)
        here = self._node.plan.name
        control.replay(control.Log.of_stacks(here), here)
        for child in self._children:
            child.send(control.LogStacks())
            log.error("node %s: %s", child.name, child.condition())
        return error
