"""Where a system may be used: in the process and on the loop of its start."""

import asyncio
import threading

import pytest

from nanoactor.runtime.errors import NotUsableHere
from nanoactor.runtime.origin import Origin


def test_before_the_start_no_place_is_the_right_one():
    async def main():
        origin = Origin()
        assert not origin.is_this_process
        assert not origin.is_here
        assert origin.loop_elsewhere is None
        with pytest.raises(NotUsableHere):
            origin.check()

    asyncio.run(main())


def test_another_loop_is_not_here_and_known_while_it_runs():
    origin = Origin()
    started, done = threading.Event(), threading.Event()

    async def begin():
        assert origin.record() is asyncio.get_running_loop()
        origin.check()
        assert origin.is_here
        assert origin.loop_elsewhere is None
        started.set()
        await asyncio.to_thread(done.wait)

    async def elsewhere():
        assert origin.is_this_process
        assert not origin.is_here
        with pytest.raises(NotUsableHere, match="another event loop"):
            origin.check()
        return origin.loop_elsewhere

    thread = threading.Thread(target=lambda: asyncio.run(begin()))
    thread.start()
    started.wait()
    assert asyncio.run(elsewhere()) is origin.loop
    done.set()
    thread.join()
    assert asyncio.run(elsewhere()) is None


def test_a_forked_process_is_another_one():
    async def main():
        origin = Origin()
        origin.record()
        origin.pid -= 1  # as a fork would see it
        assert not origin.is_this_process
        assert not origin.is_here
        assert origin.loop_elsewhere is None
        with pytest.raises(NotUsableHere, match="another process"):
            origin.check()

    asyncio.run(main())
