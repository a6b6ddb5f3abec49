"""The control channel of a node: startup, readiness, log records, queries, shutdown.

It is a `multiprocessing` connection over an inherited socket pair. It is independent of the edges,
so it works before they are open and after an actor has failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from typing import Any, Literal

from nanoactor.runtime.actor import Progress, ReadyInfo
from nanoactor.runtime.errors import is_out_of_resources
from nanoactor.runtime.node import NodePlan

_MAX_SUMMARY = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Bootstrap:
    """Parent to child, as the first message: the node to run."""

    plan: NodePlan
    parent_pid: int
    log_level: int
    blocked_modules: tuple[str, ...]
    nice: int


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Parent to child: every node is ready; start the message flow."""

    ready: Mapping[str, ReadyInfo]
    """Records that the actors of all nodes have published, by actor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """Parent to child: report the node's statistics, spans or activity."""

    what: Literal["statistics", "trace", "activity"]
    arguments: tuple[int, ...] = ()
    """Arguments of the `Node` method that `what` names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """Parent to child: report that the loop runs, and the progress of the current work."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pong:
    """Child to parent, from its loop: the answer to a `Ping`."""

    progress: Mapping[str, Progress]


@dataclasses.dataclass(frozen=True, slots=True)
class LogStacks:
    """Parent to child: log the stacks of all threads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Parent to child: another node has died; restart on new edges. The plan's descriptors follow,
    in the order of `NodePlan.descriptors`."""

    plan: NodePlan


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Parent to child: stop the node and exit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: all actors are set up."""

    actors: Mapping[str, ReadyInfo]
    """Record that each of the node's actors publishes."""
    schema: Mapping[int, str]
    """Digests of the message classes registered in the child, by message number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """Child to parent: the node has started and receives messages."""


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "the text of the error cannot be read"


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """Child to parent: an actor raised, at start or later; the process ends."""

    actor: str
    summary: str
    """One line: the actor, the exception's class and its message."""
    trace: str
    exception: bytes
    """The pickled exception if its class sets `picklable = True`, else empty."""
    is_resource_failure: bool
    """True if the cause is that the machine is out of a resource."""

    @classmethod
    def of(cls, actor: str, error: BaseException) -> Failed:
        """Describe an exception so that another process can raise it, or at least report it."""
        trace = "".join(traceback.format_exception(error))
        line = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:_MAX_SUMMARY]
        pickled = b""
        if getattr(type(error), "picklable", False):
            with contextlib.suppress(Exception):  # then only its text is sent
                pickled = pickle.dumps(error)
        summary = f"actor {actor} failed: {line}"
        return cls(actor, summary, trace, pickled, is_out_of_resources(error))

    def original(self) -> BaseException | None:
        """Return the original exception if it was pickled and can be unpickled, else None."""
        try:
            return pickle.loads(self.exception) if self.exception else None  # noqa: S301 - our child
        except Exception:  # pickle cannot construct it
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Child to parent: the answer to the oldest unanswered `Query`."""

    answer: Any
    """Statistics by actor, a `NodeTrace`, or activity by track."""


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """Child to parent: one log record with its message already formatted."""

    name: str
    level: int
    text: str
    created: float
    pid: int

    @classmethod
    def of_stacks(cls, node: str) -> Log:
        """Return a log record at error level with the stacks of all threads of this process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"stacks of node {node} (pid {os.getpid()}):"]
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
        text = "\n".join(parts)
        return cls(f"nanoactor.{node}", logging.ERROR, text, time.time(), os.getpid())


_MAX_DESCRIPTORS_PER_MESSAGE = 200
"""Number of descriptors sent in one kernel message, which may hold up to 253."""


def send_descriptors(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send copies of descriptors after the data sent so far."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        for start in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_MESSAGE):
            sendfds(channel, list(descriptors[start : start + _MAX_DESCRIPTORS_PER_MESSAGE]))


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    """Receive `count` descriptors from `send_descriptors`. Raises `EOFError` if the sender is
    gone."""
    found: list[int] = []
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        while len(found) < count:
            found += recvfds(channel, min(_MAX_DESCRIPTORS_PER_MESSAGE, count - len(found)))
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found


class ChannelHandler(logging.Handler):
    """Sends a child's log records to the parent, which handles them according to its own logging
    setup."""

    def __init__(self, connection: Connection, lock: threading.Lock) -> None:
        super().__init__()
        self._connection = connection
        self._lock_channel = lock

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and send it. A failure loses nothing: if the parent is gone, this process
        ends, too."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        entry = Log(record.name, record.levelno, text, record.created, os.getpid())
        try:
            with self._lock_channel:
                self._connection.send(entry)
        except OSError:
            self.handleError(record)


def replay(entry: Log, node: str) -> None:
    """Pass a child's log record to this process's logging, under the same logger name."""
    logger = logging.getLogger(entry.name)
    if not logger.isEnabledFor(entry.level):
        return
    record = logger.makeRecord(
        entry.name, entry.level, fn="", lno=0, msg="%s", args=(entry.text,), exc_info=None
    )
    record.created, record.process, record.processName = entry.created, entry.pid, node
    try:
        logger.handle(record)
    except Exception:  # of the user's handler or filter; this thread must survive it
        traceback.print_exc()
