"""The supervisor, which reacts to what happens to a system's nodes (processes)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from nanoactor.runtime import control
from nanoactor.runtime.children import ChildProcess
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.runtime.nodes import Nodes
from nanoactor.runtime.recoveries import Recoveries, RecoveryCallbacks
from nanoactor.runtime.recovery import details
from nanoactor.runtime.watchdog import Watchdog, kill_hung
from nanoactor.runtime.wiring import Options

log = logging.getLogger("nanoactor.system")

_LAST_MESSAGE_SECONDS = 0.02
"""Seconds after a child's exit in which its last message is received."""


class Supervisor:
    """The observer of a system's nodes. It has nodes that die or stall replaced and, if that is not
    possible, declares the system dead."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        on_death: Callable[[BaseException], None],
        has_work: Callable[[], bool],
        callbacks: RecoveryCallbacks,
    ) -> None:
        """`on_death` is called once, on the loop, when the system has become unusable. Nodes are
        watched for stalls while `has_work` returns True."""
        self._nodes = nodes
        self._options = options
        self._on_death = on_death
        self._has_work = has_work
        self.recoveries = Recoveries(nodes, options, callbacks, self._die, self._watch)
        self.dead: BaseException | None = None
        """The error that made the system unusable; None while it is usable."""
        self._watchdog: Watchdog | None = None
        self._is_running = False
        self._is_closing = False

    def begin(self) -> None:
        """Watch for stalls and replace dead nodes from now on: the system has started."""
        self._is_running = True
        self._watch()

    def stop(self) -> None:
        """End the watch, because the system is being closed: no end of a node counts as a death
        from now on."""
        self._is_closing = True
        self._stop_watching()
        self.recoveries.stop()

    def on_message(self, child: ChildProcess, message: Any) -> None:
        """Handle a control message from a child, or None if its channel is closed."""
        match message:
            case _ if self._nodes.children.by_name.get(child.name) is not child:
                pass  # the child was replaced
            case control.Pong(progress):
                if self._watchdog is not None:
                    self._watchdog.record_reply(child.name, progress)
            case None:  # the channel is closed, and all of its messages have been handled
                self._child_ended(child)
            case _:
                child.on_message(message)

    def on_exit(self, child: ChildProcess) -> None:
        """Handle the exit of a child once its last message was received."""
        if not self._is_closing:
            loop = asyncio.get_running_loop()
            loop.call_later(_LAST_MESSAGE_SECONDS, self._child_ended, child)

    def on_failure(self, actor: str, error: BaseException) -> None:
        """Declare the system dead, because an actor of this process has failed."""
        log.error("actor %s failed", actor, exc_info=error)
        failure = RuntimeFault(f"actor {actor} failed: {error!r}")
        failure.__cause__ = error
        self._die(failure)

    def _child_ended(self, child: ChildProcess) -> None:
        if child.has_ended or self._nodes.children.by_name.get(child.name) is not child:
            return  # already recorded
        child.record_end()
        error = child.fail_start()
        if self.dead is not None or self._is_closing:
            return
        if self._is_running and self.recoveries.begin(child, error):
            self._stop_watching()
        else:
            self._die(error)

    def _stalled(self, error: BaseException, node: str) -> None:
        """Handle the watchdog's report that a node has stalled: kill the node or, if it cannot be
        replaced, end the system."""
        child = self._nodes.children.by_name.get(node)
        if child is None or not self._options.max_restarts:
            self._die(error)
        else:
            kill_hung(child, str(error))

    def _die(self, error: BaseException) -> None:
        if self.dead is not None or self._is_closing:
            return
        self.dead = error
        if self._is_running:
            log.error("the system has died: %s%s", error, details(error))
        self._stop_watching()
        self.recoveries.stop()
        self._nodes.kill(str(error))
        self._on_death(error)

    def _watch(self) -> None:
        timeout = self._options.stall_timeout
        if timeout is not None and self.dead is None and not self._is_closing:
            self._watchdog = Watchdog(
                self._nodes.children, self._nodes.own, timeout, self._has_work, self._stalled
            )

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
