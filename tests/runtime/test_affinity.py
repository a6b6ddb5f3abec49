"""Where a system may be used: in the process and on the loop of its start."""

import asyncio
import threading

import pytest

from nanoactor.runtime.affinity import LoopAffinity
from nanoactor.runtime.errors import NotUsableHere


def test_before_the_start_no_place_is_the_right_one():
    async def main():
        affinity = LoopAffinity()
        assert not affinity.is_this_process
        assert not affinity.is_here
        assert affinity.loop_elsewhere is None
        with pytest.raises(NotUsableHere):
            affinity.check()

    asyncio.run(main())


def test_another_loop_is_not_here_and_known_while_it_runs():
    affinity = LoopAffinity()
    started, done = threading.Event(), threading.Event()

    async def begin():
        assert affinity.record() is asyncio.get_running_loop()
        affinity.check()
        assert affinity.is_here
        assert affinity.loop_elsewhere is None
        started.set()
        await asyncio.to_thread(done.wait)

    async def elsewhere():
        assert affinity.is_this_process
        assert not affinity.is_here
        with pytest.raises(NotUsableHere, match="another event loop"):
            affinity.check()
        return affinity.loop_elsewhere

    thread = threading.Thread(target=lambda: asyncio.run(begin()))
    thread.start()
    started.wait()
    assert asyncio.run(elsewhere()) is affinity.loop
    done.set()
    thread.join()
    assert asyncio.run(elsewhere()) is None


def test_a_forked_process_is_another_one():
    async def main():
        affinity = LoopAffinity()
        affinity.record()
        affinity.pid -= 1  # as a fork would see it
        assert not affinity.is_this_process
        assert not affinity.is_here
        assert affinity.loop_elsewhere is None
        with pytest.raises(NotUsableHere, match="another process"):
            affinity.check()

    asyncio.run(main())
