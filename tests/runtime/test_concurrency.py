"""`run_all`: order, limit, and what the first error does."""

import asyncio
import functools

import pytest

from nanoactor.runtime.concurrency import run_all


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
def test_results_keep_their_order_and_the_limit_holds(at_once):
    begun, under_way, most = [], 0, 0

    async def call(number):
        nonlocal under_way, most
        begun.append(number)
        under_way += 1
        most = max(most, under_way)
        for _ in range(1 + number * 7 % 5):
            await asyncio.sleep(0)
        under_way -= 1
        return number

    results = asyncio.run(run_all([functools.partial(call, n) for n in range(20)], at_once))
    assert results == begun == list(range(20))
    assert most == min(at_once or 20, 20)
    assert asyncio.run(run_all([], at_once)) == []


def test_the_first_error_ends_the_others_before_it_is_raised():
    ended, begun = [], []

    async def call(number):
        begun.append(number)
        try:
            if number == 1:
                raise KeyError(number)
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main():
        with pytest.raises(KeyError, match="1"):
            await run_all([functools.partial(call, n) for n in range(9)], 3)
        assert begun == sorted(ended) == [0, 1, 2]

    asyncio.run(main())
