"""Many calls with few of them under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def run_all(calls: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Return the results of all calls, in their order, with at most `at_once` under way.

    The first that raises ends the others.
    """
    results: dict[int, T] = {}
    numbered = iter(enumerate(calls))

    async def work() -> None:
        for number, call in numbered:
            results[number] = await call()

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(calls)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(calls))]
