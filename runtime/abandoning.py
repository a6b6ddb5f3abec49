"""The end of systems that were dropped and not closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

_LOOK, _LONGEST_LOOK = 0.01, 1.0
"""Seconds between two checks of a loop, at first and at most."""


def close_soon(
    loop: asyncio.AbstractEventLoop,
    close: Callable[[], Coroutine[Any, Any, None]],
    end: Callable[[], None],
    is_closed: Callable[[], bool],
) -> None:
    """Call `close` on a loop without waiting for it; from any thread.

    If the loop is closed before that is done, and `is_closed` returns True, `end` is called on a
    thread instead.
    """

    def watch() -> None:
        wait = _LOOK
        while not is_closed():
            if loop.is_closed():
                end()
                return
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_LOOK)

    coroutine = close()
    try:
        asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop is closed
        coroutine.close()
        end()
        return
    with contextlib.suppress(RuntimeError):  # without a thread it is for the loop alone
        threading.Thread(target=watch, name="nanoactor-abandoned", daemon=True).start()
