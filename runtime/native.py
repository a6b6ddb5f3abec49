"""A context manager that converts every error of a native library to an `Exception`.

A panic in a Rust extension raises a `BaseException`. It would pass through every `except Exception`
and end the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_PASSED_THROUGH = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class NativePanic(Exception):
    """A native library raised an error that is no `Exception`, such as a Rust panic."""


@contextlib.contextmanager
def native_calls() -> Iterator[None]:
    """Convert errors inside the context to `NativePanic` if they are not derived from `Exception`.
    Cancellation, `KeyboardInterrupt` and `SystemExit` pass through unchanged."""
    try:
        yield
    except _PASSED_THROUGH:
        raise
    except BaseException as error:
        raise NativePanic(f"{type(error).__name__}: {error}") from error
