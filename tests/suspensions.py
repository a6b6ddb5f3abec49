"""Something happens to a coroutine at the k-th place where it waits, for every k."""

import asyncio
import types


@types.coroutine
def _counted(awaitable, at, act):
    """Await it; call `act` when it is suspended for the `at`-th time, counted from 1. Returns what
    it returns; `act.met` tells whether there was such a place."""
    inner, count, error = awaitable.__await__(), 0, None
    while True:
        try:
            waits_for = inner.send(None) if error is None else inner.throw(error)
        except StopIteration as stop:
            return stop.value
        count += 1
        if count == at:
            act.met = True
            asyncio.get_running_loop().call_soon(act)
        try:
            error = None
            yield waits_for
        except BaseException as raised:
            error = raised


class Act:
    """A function that notes whether it was called, and makes a task of what it returns."""

    def __init__(self, function):
        self.function, self.met, self.tasks = function, False, []

    def __call__(self):
        made = self.function()
        if asyncio.iscoroutine(made):
            self.tasks.append(asyncio.ensure_future(made))


async def interrupted(awaitable, at, function):
    """Await something; `function` is called at its `at`-th suspension, and what it returns awaited.
    Returns (the result or the exception, whether there was such a suspension)."""
    act = Act(function)
    try:
        result = await _counted(awaitable, at, act)
    except BaseException as error:
        result = error
    await asyncio.gather(*act.tasks, return_exceptions=True)
    return result, act.met


async def cancelled(awaitable, at):
    """Await something in a task of its own, which is cancelled at its `at`-th suspension."""
    act = Act(lambda: task.cancel() and None)

    async def run():
        return await _counted(awaitable, at, act)

    task = asyncio.ensure_future(run())
    (result,) = await asyncio.gather(task, return_exceptions=True)
    return result, act.met


def places(most=200):
    """1, 2, ... for as long as the loop's body says that there was such a place."""
    yield from range(1, most)
    raise AssertionError("it never ends")
