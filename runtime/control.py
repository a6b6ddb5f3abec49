"""The control channel between a node's process and its parent: messages for startup, logs, queries
and shutdown.

The channel is a `multiprocessing` connection over an inherited socket pair. It does not depend on
the edges between actors, so it works before they are open and after an actor has failed.
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
    """Parent to child, the first message: the node to run and how its process is set up."""

    plan: NodePlan
    parent_pid: int
    log_level: int
    blocked_modules: tuple[str, ...]
    nice: int


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Parent to child: every node is ready, so start the actors and receive messages."""

    ready: Mapping[str, ReadyInfo]
    """Record that each actor of the whole system has published, by actor name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """Parent to child: report the node's statistics, spans or activity."""

    what: Literal["statistics", "trace", "activity"]
    arguments: tuple[int, ...] = ()
    """Positional arguments of the `Node` method that `what` names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """Parent to child: answer with a `Pong`, which proves that the loop runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pong:
    """Child to parent, sent from the child's loop: the answer to a `Ping`, with the progress of
    each actor that reports one."""

    progress: Mapping[str, Progress]


@dataclasses.dataclass(frozen=True, slots=True)
class LogStacks:
    """Parent to child: log the stacks of all threads of the child."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Parent to child: another node has died, so restart the actors with new edges (channels).
    Copies of the plan's descriptors follow, in the order of `NodePlan.descriptors`."""

    plan: NodePlan


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Parent to child: stop the node and exit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: all actors are set up."""

    actors: Mapping[str, ReadyInfo]
    """Record that each of this node's actors publishes, by actor name."""
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
    """Child to parent: an actor raised an exception, and the child exits."""

    actor: str
    summary: str
    """One line of text: the actor, the exception's class and its message."""
    trace: str
    exception: bytes
    """The pickled exception if its class sets `picklable = True` and pickling succeeds, else
    empty."""
    is_resource_failure: bool
    """True if the exception means that the machine is out of a resource, such as memory."""

    @classmethod
    def of(cls, actor: str, error: BaseException) -> Failed:
        """Return the message about an exception that an actor raised. The parent reports the
        exception or, if it could be pickled, raises it."""
        trace = "".join(traceback.format_exception(error))
        line = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:_MAX_SUMMARY]
        pickled = b""
        if getattr(type(error), "picklable", False):
            with contextlib.suppress(Exception):  # then only its text is sent
                pickled = pickle.dumps(error)
        summary = f"actor {actor} failed: {line}"
        return cls(actor, summary, trace, pickled, is_out_of_resources(error))

    def original(self) -> BaseException | None:
        """Return the original exception, or None if it was not pickled or cannot be unpickled."""
        try:
            return pickle.loads(self.exception) if self.exception else None  # noqa: S301 - our child
        except Exception:  # pickle cannot construct it
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Child to parent: the answer to the oldest unanswered `Query`."""

    answer: Any
    """Return value of the `Node` method: statistics by actor, a `NodeTrace`, or activity by
    track."""


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """Child to parent: one log record whose message is already formatted."""

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
"""Number of descriptors sent in one socket message; the kernel allows at most 253."""


def send_descriptors(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send copies of file descriptors over the channel, after the data sent so far."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        for start in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_MESSAGE):
            sendfds(channel, list(descriptors[start : start + _MAX_DESCRIPTORS_PER_MESSAGE]))


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    """Receive `count` file descriptors sent by `send_descriptors`. They are not inheritable. Raises
    `EOFError` if the sender is gone."""
    found: list[int] = []
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        while len(found) < count:
            found += recvfds(channel, min(_MAX_DESCRIPTORS_PER_MESSAGE, count - len(found)))
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found


class ChannelHandler(logging.Handler):
    """Logging handler of a child process. It sends log records to the parent, which handles them
    according to its own logging configuration."""

    def __init__(self, connection: Connection, lock: threading.Lock) -> None:
        super().__init__()
        self._connection = connection
        self._lock_channel = lock

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and send it to the parent. If the parent is gone, the record is dropped;
        this process is about to end, too."""
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
    """Log a child's record in this process, under the logger name that the child used."""
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
