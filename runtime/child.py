"""Main program of a child process, which runs the actors of one node. The process dies with its
parent, ignores signals to the process group, and runs one event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import uvloop

from nanoactor.runtime import control
from nanoactor.runtime.codec import schema_hashes
from nanoactor.runtime.node import Node, NodePlan
from nanoactor.runtime.process import (
    EXIT_ORPHANED,
    die_with_parent,
    ignore_group_signals,
    occupy_standard_descriptors,
)

EXIT_FAILED = 71


def main(descriptor: int) -> None:
    """Run a node in this child process; never returns. `descriptor` is the child's end of the
    control channel."""
    ignore_group_signals()
    occupy_standard_descriptors()
    if sys.stderr is None:  # closed by the user
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable()
    connection = Connection(descriptor)
    bootstrap = connection.recv()
    if isinstance(bootstrap, control.Stop):  # the system was closed before it was started
        os._exit(0)
    assert isinstance(bootstrap, control.Bootstrap)
    die_with_parent(bootstrap.parent_pid, bootstrap.plan.name)
    os.nice(bootstrap.nice)
    sys.meta_path.insert(0, _ImportBlocker(bootstrap.blocked_modules))
    child = _Child(bootstrap, connection)
    child.run()


class _ImportBlocker(importlib.abc.MetaPathFinder):
    """Import hook that refuses the modules that this node must not import."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise `ModuleNotFoundError` if the top-level package is blocked, else return None, which
        leaves the module to the usual finders."""
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(
                f"{fullname} must not be imported in this node", name=fullname
            )
        return None


class _Child:
    """The node, its event loop, and the thread that receives control messages from the parent."""

    def __init__(self, bootstrap: control.Bootstrap, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._current_actor = bootstrap.plan.actors[0].name
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._node = Node(bootstrap.plan, self._fail)
        self._name = bootstrap.plan.name
        root = logging.getLogger()
        root.setLevel(bootstrap.log_level)
        root.addHandler(control.ChannelHandler(connection, self._lock))

    def run(self) -> None:
        """Set up the actors, report that they are ready, and run the loop until the node is
        stopped."""
        asyncio.set_event_loop(self._loop)
        try:
            threading.Thread(target=self._listen, name="control", daemon=True).start()
            ready = self._node.setup(self._set_current_actor)
            # The objects of the setup live on: spare the garbage collector from rescanning them.
            gc.collect()
            gc.freeze()
            self._send(control.Ready(ready, schema_hashes()))
        except BaseException as error:
            self._fail(self._current_actor, error)
        self._loop.run_forever()

    def _set_current_actor(self, actor: str) -> None:
        self._current_actor = actor

    def _send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def _fail(self, actor: str, error: BaseException) -> None:
        """Report the failure and exit: a node with a failed actor is useless."""
        try:
            self._send(control.Failed.of(actor, error))
        finally:
            os._exit(EXIT_FAILED)

    def _listen(self) -> None:
        """Receive control messages on a thread of its own, because the loop may be blocked in C
        code. Exit when the parent is gone."""
        try:
            while True:
                self._listen_once()
        except Exception as error:  # such as an unreadable message: the parent would wait
            self._fail(self._current_actor, error)

    def _listen_once(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            os._exit(EXIT_ORPHANED)
        if isinstance(message, control.Cut):
            message = self._receive_edges(message)
        if isinstance(message, control.LogStacks):  # on this thread, as the loop may hang
            self._send(control.Log.of_stacks(self._name))
        else:
            self._loop.call_soon_threadsafe(self._handle, message)

    def _receive_edges(self, message: control.Cut) -> control.Cut:
        theirs = message.plan.descriptors
        try:
            ours = control.receive_descriptors(self._connection, len(theirs))
        except (EOFError, OSError):
            os._exit(EXIT_ORPHANED)
        return control.Cut(message.plan.remapped(dict(zip(theirs, ours, strict=True))))

    def _cut_node(self, plan: NodePlan) -> None:
        try:
            ready = self._node.cut(plan, self._set_current_actor)
        except BaseException as error:
            self._fail(self._current_actor, error)
        self._send(control.Ready(ready, schema_hashes()))

    def _handle(self, message: Any) -> None:
        match message:
            case control.Cut(plan):
                self._cut_node(plan)
            case control.Start(ready):
                try:
                    self._node.start(self._loop, ready)
                except BaseException as error:
                    self._fail(self._current_actor, error)
                self._send(control.Started())
            case control.Ping():
                self._send(control.Pong(self._node.progress()))
            case control.Query(what, arguments):
                try:
                    self._send(control.Reply(getattr(self._node, what)(*arguments)))
                except BaseException as error:
                    self._fail(self._current_actor, error)
            case control.Stop():
                # stop() releases everything that must be released; skipping the shutdown of the
                # interpreter saves half a second in a process that uses torch.
                self._node.stop()
                os._exit(0)
