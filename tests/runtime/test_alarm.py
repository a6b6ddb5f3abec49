"""Nodes rouse one another, look for messages for a moment, and sleep again."""

import asyncio
import os

import pytest
import uvloop

from nanoactor.runtime.alarm import Alarm, create_alarms
from nanoactor.runtime.system import System
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.runtime.wiring import Options, wire
from tests.conftest import descriptors

LONG = 1000.0


class Alarms:
    """Three of them on one loop."""

    def __init__(self, seconds, may_stay=lambda: True, rehearse=lambda: iter(())):
        self.plans = create_alarms("abc", seconds)
        loop = asyncio.get_running_loop()
        alarms = (Alarm(plan, loop, may_stay, rehearse) for plan in self.plans.values())
        self.a, self.b, self.c = alarms

    def close(self):
        for alarm in (self.a, self.b, self.c):
            alarm.close()


def with_alarms(test, *arguments, run=asyncio.run):
    async def main():
        alarms = Alarms(*arguments)
        try:
            await test(alarms)
        finally:
            alarms.close()

    run(asyncio.sleep(0))  # uvloop keeps two descriptors from its first loop on
    before = descriptors()
    run(main())
    assert descriptors() == before


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def heard(alarm, times=1):
    while alarm.wakeups < times:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_who_is_roused_looks_until_told_to_rest(run):
    async def test(alarms):
        alarms.a.wake_others()
        await asyncio.gather(heard(alarms.b), heard(alarms.c))
        assert (alarms.a.wakeups, alarms.a.polls) == (0, 0)
        before = alarms.b.polls
        await turns(50)
        assert alarms.b.polls >= before + 40
        alarms.b.allow_sleep()
        await turns(2)
        before = alarms.b.polls
        await turns(50)
        assert alarms.b.polls == before
        alarms.c.wake_others()
        await heard(alarms.b, 2)
        await turns(50)
        assert alarms.b.polls >= before + 40

    with_alarms(test, LONG, run=run)


def test_who_has_roused_the_others_does_not_rouse_them_again_at_once():
    async def test(alarms):
        for _ in range(20):
            alarms.a.wake_others()
            await turns(5)
        await heard(alarms.b)
        await asyncio.sleep(0.02)
        assert alarms.b.wakeups == alarms.c.wakeups == 1
        alarms.b.wake_others()  # that another node has done so is not one of its business
        await heard(alarms.c, 2)

    with_alarms(test, LONG)


def test_the_others_are_roused_again_after_a_pause():
    async def test(alarms):
        while alarms.b.wakeups < 3:
            alarms.a.wake_others()
            await asyncio.sleep(0.001)

    with_alarms(test, 0.001)


def test_it_sleeps_again_by_itself():
    async def test(alarms):
        alarms.a.wake_others()
        await heard(alarms.b)
        await asyncio.sleep(0.02)
        before = alarms.b.polls
        await turns(50)
        assert alarms.b.polls == before

    with_alarms(test, 0.005)


def test_who_may_not_stay_awake_wakes_and_looks_at_nothing():
    async def test(alarms):
        alarms.a.wake_others()
        await heard(alarms.b)
        await turns(50)
        assert alarms.b.polls == 0

    with_alarms(test, LONG, lambda: False)


def test_who_is_roused_rehearses_a_part_between_two_looks():
    """What was not played is played when it is roused again, before anything new."""
    parts, begun = [], []

    def rehearse():
        begun.append(len(parts))
        for part in range(3):
            parts.append(part)
            yield part

    awake = [True]

    async def test(alarms):
        alarms.a.wake_others()
        await heard(alarms.b)
        await heard(alarms.c)
        while len(parts) < 6:
            before = len(parts), alarms.b.polls + alarms.c.polls
            await asyncio.sleep(0)
            polls = alarms.b.polls + alarms.c.polls - before[1]
            assert len(parts) - before[0] <= polls
        await turns(20)
        assert sorted(parts) == [0, 0, 1, 1, 2, 2]
        assert len(begun) == 2
        awake[0] = False
        await turns(5)
        alarms.b.wake_others()
        await heard(alarms.c, 2)
        await turns(20)
        assert len(parts) == 6
        awake[0] = True
        alarms.a._next_wake_at = 0.0
        alarms.a.wake_others()
        while len(parts) < 12:
            await asyncio.sleep(0.001)

    with_alarms(test, LONG, lambda: awake[0], rehearse)


def test_a_bell_that_nobody_hears_holds_up_nobody_and_a_closed_one_writes_nowhere():
    async def test(alarms):
        os.eventfd_write(alarms.plans["b"].bell, 2**64 - 2)  # full
        alarms.a.wake_others()
        await heard(alarms.c)
        alarms.a.close()
        # Whoever gets these numbers next must find nothing in what it opens.
        others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
        assert set(alarms.plans["a"].other_bells) < set(others)
        alarms.a.wake_others()
        for other in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
            os.close(other)

    with_alarms(test, 0.0)


def shape(*early):
    """Three nodes of one actor each."""
    nodes = {"user": "a", "one": "b", "two": "c"}
    return Topology(
        tuple(ActorSpec(name, "tests.runtime.actors:Asker", None) for name in "abc"),
        tuple(NodeSpec(name, (actor,), wakes_early=name in early) for name, actor in nodes.items()),
        (EdgeSpec("a", ("b",)), EdgeSpec("c", ("a",))),
        "user",
    )


def test_without_time_to_stay_awake_or_others_to_rouse_nothing_is_opened():
    for topology, seconds in ((shape("user", "one"), 0.0), (shape("user"), 1.0)):
        plans = wire(topology, Options(awake_seconds=seconds))
        assert all(plan.alarm is None for plan in plans.values())
        for plan in plans.values():
            for descriptor in plan.descriptors:
                os.close(descriptor)


def test_nodes_of_a_system_are_roused_where_they_say_so():
    async def main():
        system = System(shape("user", "one"), Options(awake_seconds=0.01), lambda error: None)
        await system.start()
        try:
            for _ in range(3):
                system.actor("a").context.wake_others()
                figures = await system.statistics()
            while figures["b"]["node"]["roused"] < 1:
                figures = await system.statistics()
            assert figures["a"]["node"]["roused"] == 0
            assert "roused" not in figures["c"]["node"]
        finally:
            await system.close()

    before = descriptors()
    asyncio.run(main())
    assert descriptors() == before
