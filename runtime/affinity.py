"""The process and the event loop in which a system was started."""

from __future__ import annotations

import asyncio
import os

from nanoactor.runtime.errors import NotUsableHere


class LoopAffinity:
    """The process and the event loop in which a `System` was started: the only ones in which it can
    be used. Before the start, no process and no loop is the right one."""

    def __init__(self) -> None:
        self.pid = 0
        """Process id; 0 before the start."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop; None before the start."""

    def record(self) -> asyncio.AbstractEventLoop:
        """Record that the system is started in this process and on the running loop. Return the
        loop."""
        self.loop, self.pid = asyncio.get_running_loop(), os.getpid()
        return self.loop

    def check(self) -> None:
        """Raise `NotUsableHere` unless the process and the event loop are those of the start."""
        if not self.is_this_process:
            raise NotUsableHere(
                "the engine was started in another process; start it after the fork, not before"
            )
        if asyncio.get_running_loop() is not self.loop:
            raise NotUsableHere(
                "the engine was started on another event loop; use it on that loop, or start a "
                "second engine"
            )

    @property
    def is_this_process(self) -> bool:
        """True if the system was started in this process. False in a process forked from it."""
        return os.getpid() == self.pid

    @property
    def is_here(self) -> bool:
        """True if the system was started in this process and on the running event loop."""
        return self.is_this_process and asyncio.get_running_loop() is self.loop

    @property
    def loop_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the start, if it is not the current one and still runs in another thread of
        this process; otherwise None."""
        loop = self.loop
        if loop is None or not self.is_this_process or self.is_here or not loop.is_running():
            return None
        return loop
