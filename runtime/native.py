"""Calls into native libraries, with every error that they raise converted to an `Exception`.

A panic in a Rust extension is a `BaseException`, which passes through every `except Exception` and
so ends an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_PASSED_THROUGH = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class NativePanic(Exception):
    """A native library panicked."""


@contextlib.contextmanager
def native_calls() -> Iterator[None]:
    """Convert an error that a library raises in this context to a `NativePanic` if it is no
    `Exception`."""
    try:
        yield
    except _PASSED_THROUGH:
        raise
    except BaseException as error:
        raise NativePanic(f"{type(error).__name__}: {error}") from error
