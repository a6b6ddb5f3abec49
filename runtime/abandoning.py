"""Shutdown of actor systems that the user's program dropped without closing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.01, 1.0
"""First and longest interval, in seconds, between checks whether the loop is closed."""


def close_soon(
    loop: asyncio.AbstractEventLoop,
    close: Callable[[], Coroutine[Any, Any, None]],
    end: Callable[[], None],
    is_closed: Callable[[], bool],
) -> None:
    """Schedule a shutdown on a loop without waiting for it. May be called from any thread.

    `close` is the shutdown as a coroutine function, and `end` is the same without a loop. If the
    loop is already closed, `end` is called at once. If the loop is closed before the shutdown is
    complete (`is_closed` returns True), a background thread calls `end`.
    """

    def watch() -> None:
        interval = _FIRST_POLL_SECONDS
        while not is_closed():
            if loop.is_closed():
                end()
                return
            time.sleep(interval)
            interval = min(2 * interval, _MAX_POLL_SECONDS)

    coroutine = close()
    try:
        asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop is closed
        coroutine.close()
        end()
        return
    with contextlib.suppress(RuntimeError):  # without a thread, only the loop can close it
        threading.Thread(target=watch, name="nanoactor-abandoned", daemon=True).start()
