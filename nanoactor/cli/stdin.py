"""Reading of standard input without a thread, because a blocked thread would keep Ctrl-C from
ending the program."""

from __future__ import annotations

import asyncio
import os


class LineReader:
    """Reads lines from a file descriptor as data arrives, without blocking the event loop. The
    descriptor's flags are left unchanged, because standard output shares them if both are the same
    terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""
        self._at_end = False

    async def next(self) -> str | None:
        """Return the next line without its line ending, or None at the end of the input."""
        while b"\n" not in self._buffer and not self._at_end:
            await self._wait_readable()
            data = os.read(self._descriptor, 1 << 16)
            self._buffer += data
            self._at_end = not data
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, ready.set)
        except PermissionError:  # a regular file is always readable
            return
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)
