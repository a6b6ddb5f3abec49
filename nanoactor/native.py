"""Calls into libraries that are not Python: whatever they raise is an `Exception`.

A panic of an extension in Rust is a `BaseException`, which passes every `except Exception`, and so
ends an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_NOT_THEIRS = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class NativePanic(Exception):
    """A library met something that its authors thought impossible."""


@contextlib.contextmanager
def native_calls() -> Iterator[None]:
    """Turn what a library raises within, and no `Exception` is, into a `NativePanic`."""
    try:
        yield
    except _NOT_THEIRS:
        raise
    except BaseException as error:
        raise NativePanic(f"{type(error).__name__}: {error}") from error
