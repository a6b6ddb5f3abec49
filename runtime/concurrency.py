"""Concurrent execution of asynchronous calls with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def run_all(
    calls: Sequence[Callable[[], Awaitable[T]]], max_concurrent: int | None = None
) -> list[T]:
    """Run all calls concurrently and return their results, in the order of the calls.

    Calls start in order, and at most `max_concurrent` of them (None: all) run at a time. If a call
    raises, the running calls are cancelled, and its error is raised once they have ended.
    """
    results: dict[int, T] = {}
    numbered = iter(enumerate(calls))

    async def work() -> None:
        for number, call in numbered:
            results[number] = await call()

    count = len(calls) if max_concurrent is None else min(max_concurrent, len(calls))
    workers = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(calls))]
