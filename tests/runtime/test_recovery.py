"""Nodes that die are replaced: everybody else begins anew, on other edges."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.runtime import children as children_module
from nanoactor.runtime.actor import Actor
from nanoactor.runtime.control import Failed
from nanoactor.runtime.errors import NodeDied, NodeStalled, StartupFailed, is_out_of_resources
from nanoactor.runtime.recovery import RestartBudget, StartWatch, start_limit
from nanoactor.runtime.system import System
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.runtime.wiring import Options
from tests.conftest import children, descriptors
from tests.runtime.actors import Do, Ping, Pong

pytestmark = [pytest.mark.deadly, pytest.mark.drawn(2)]

NODES = "near", "far"


class User(Actor):
    """Lives in the test's process, and goes on after a cut."""

    def __init__(self, config):
        self.pongs = []
        self.renewed = 0

    def reset(self):
        self.renewed += 1

    def handlers(self):
        return {Pong: self.pongs.append}


class Near(Actor):
    """Passes numbers on; keeps its process's id, and counts what it saw since it began anew."""

    def __init__(self, config):
        self.seen = self.rehearsed = 0
        self.born = time.monotonic_ns()

    def setup(self):
        return "made"

    def reset(self):
        self.seen = 0
        return "renewed"

    def start(self, context, ready):
        super().start(context, ready)
        self.ready = ready

    def handlers(self):
        return {Ping: self.ping, Do: self.do}

    def ping(self, ping):
        self.seen += 1
        self.context.outbox("far").send(self.context.owned_copy(ping))

    def do(self, do):
        if do.what == "raise":
            raise ValueError("asked to")
        if do.what == "hang":
            time.sleep(600)
        if do.what == "later":  # of a call that is under way when everything begins anew
            self.context.call_later(0.2, lambda: os._exit(9))

    def rehearse(self):
        while True:  # so that it is half-way whenever everything begins anew
            self.rehearsed += 1
            yield

    def statistics(self):
        told = {"seen": self.seen, "born": self.born, "ready": dict(self.ready)}
        return told | {"rehearsed": self.rehearsed}


class Far(Actor):
    """Is made anew each time."""

    def __init__(self, config):
        self.seen = 0
        self.delay = config

    def setup(self):
        time.sleep(self.delay)

    def handlers(self):
        return {Ping: self.ping}

    def ping(self, ping):
        self.seen += 1
        pong = Pong(ping.number, int(ping.data.sum()), os.getpid())
        self.context.outbox("user").send(pong)

    def statistics(self):
        return {"seen": self.seen}


def topology(delay=0.0):
    here = "tests.runtime.test_recovery"
    return Topology(
        (
            ActorSpec("user", f"{here}:User", None),
            ActorSpec("near", f"{here}:Near", None),
            ActorSpec("far", f"{here}:Far", delay),
        ),
        (
            NodeSpec("user", ("user",), wakes_early=True),
            *(NodeSpec(n, (n,), wakes_early=True) for n in NODES),
        ),
        (
            EdgeSpec("user", ("near",)),
            EdgeSpec("near", ("far",)),
            EdgeSpec("far", ("user",), bound=1000),
        ),
        "user",
    )


class Running:
    """A started system, and what it told."""

    def __init__(self, delay=0.0, **options):
        self.deaths, self.told = [], []
        self.untold, self.explained = [], 0
        values = dict(debug=True, max_restarts=100, restart_window=0.01, awake_seconds=0.001)
        values |= options
        self.system = System(
            topology(delay),
            Options(**values),
            self.deaths.append,
            lambda: True,
            on_cut=self.cut,
            on_recovered=lambda: self.told.append("recovered"),
        )

    def cut(self, deaths):
        self.told.append("cut")
        self.untold += deaths
        return self.explained

    async def __aenter__(self):
        await self.system.start()
        self.user = self.system.actor("user")
        return self

    async def __aexit__(self, *_):
        await self.system.close()

    def kill(self, name, how=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, KeyError):  # dead, or not there yet
            os.kill(self.system.pids[name], how)

    async def until(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            await asyncio.sleep(0.002)

    async def recovered(self, times=1):
        await self.until(lambda: self.told.count("recovered") >= times or self.deaths)
        assert not self.deaths

    async def echo(self, numbers):
        """All of these come back, once, and in order."""
        self.user.pongs.clear()
        for number in numbers:
            data = np.full(10, number, np.int32)
            self.user.context.outbox("near").send(Ping(number, data))
        await self.until(lambda: len(self.user.pongs) >= len(numbers))
        assert [pong.number for pong in self.user.pongs] == list(numbers)
        assert [pong.total for pong in self.user.pongs] == [10 * number for number in numbers]


def limit_restarts(run, seconds):
    """From now on; the start itself had longer."""
    recoveries = run.system._recoveries
    recoveries._options = dataclasses.replace(recoveries._options, start_timeout=seconds)


@pytest.mark.parametrize("transport", ["ring", "queue"])
@pytest.mark.parametrize("victim", NODES)
def test_whoever_dies_is_replaced_and_messages_flow_again(victim, transport):
    async def main():
        async with Running(transport=transport) as run:
            await run.echo(range(50))
            before = dict(run.system.pids)
            figures = await run.system.statistics()
            run.kill(victim)
            await run.recovered()
            assert run.told == ["cut", "recovered"]
            assert run.user.renewed == 1
            changed = {name for name in NODES if run.system.pids[name] != before[name]}
            assert changed == {victim} == set(run.system.restarts)
            await run.echo(range(100, 150))
            after = await run.system.statistics()
            assert after["near"]["actor"]["seen"] == 50
            assert after["far"]["actor"]["seen"] == 50
            told = after["near"]["actor"]["ready"]["near"]
            assert told == ("made" if victim == "near" else "renewed")
            same = after["near"]["actor"]["born"] == figures["near"]["actor"]["born"]
            assert same == (victim != "near")
            assert run.system.recovering is None
            assert run.system.restart_seconds > 0

    asyncio.run(main())
    assert not children()


def test_a_rehearsal_under_way_is_given_up():
    async def main():
        async with Running(awake_seconds=60.0) as run:
            run.user.context.alarm.wake_others()
            await run.echo(range(5))
            before = (await run.system.statistics())["near"]["actor"]
            assert before["rehearsed"] > 1
            run.kill("far")
            await run.recovered()
            await run.echo(range(5))
            after = (await run.system.statistics())["near"]["actor"]
            assert after["born"] == before["born"]
            assert run.told == ["cut", "recovered"]

    asyncio.run(main())


def test_messages_under_way_never_arrive_after_the_cut():
    async def main():
        async with Running() as run:
            for turn in range(3):
                for number in range(40):
                    data = np.full(10, number, np.int32)
                    run.user.context.outbox("near").send(Ping(number, data))
                run.kill("far")
                await run.until(lambda turn=turn: run.told.count("cut") > turn)
                run.user.pongs.clear()
                await run.recovered(turn + 1)
                await asyncio.sleep(0.05)
                assert not run.user.pongs
                await run.echo(range(1000, 1010))

    asyncio.run(main())


def test_questions_that_come_meanwhile_do_no_harm():
    async def main():
        async with Running(delay=0.3) as run:
            run.kill("near")
            await run.until(lambda: "cut" in run.told)
            while run.system.recovering is not None:
                await run.system.statistics()
                await run.system.activity(time.monotonic_ns(), 1000, 4)
                await run.system.trace()
            await run.echo(range(5))
            assert run.system.restarts == {"near": 1}

    asyncio.run(main())


def test_calls_under_way_come_to_nothing():
    async def main():
        async with Running() as run:
            run.user.context.outbox("near").send(Do("later"))
            await run.echo([1])
            run.kill("far")
            await run.recovered()
            await asyncio.sleep(0.4)
            await run.echo([2])
            assert run.told == ["cut", "recovered"]

    asyncio.run(main())


def test_a_death_just_before_the_others_begin_anew():
    async def main():
        async with Running(start_timeout=600) as run:
            loop, far = asyncio.get_running_loop(), run.system._nodes.children.by_name["far"]
            far.bootstrapped = loop.create_future()  # as if it had only just been started
            run.kill("near")
            await run.until(lambda: "cut" in run.told)
            await asyncio.sleep(0.3)
            run.kill("far")
            await run.until(lambda: far.has_ended)
            far.bootstrapped.set_result(None)
            await run.until(lambda: run.system.recovering is None)
            assert run.system.restarts == {"near": 1, "far": 1}
            await run.echo(range(20))

    asyncio.run(main())


def test_a_process_that_cannot_be_started_again_ends_the_system():
    async def main():
        async with Running() as run:
            limit_restarts(run, 1)
            far = run.system._nodes.children.by_name["far"]
            far.bootstrapped = asyncio.get_running_loop().create_future()  # nobody starts it
            run.kill("near")
            await run.until(lambda: run.deaths)
            assert isinstance(run.deaths[0], StartupFailed)
            assert "not ready again after 1 s" in str(run.deaths[0])

    asyncio.run(main())
    assert not children()


def test_deaths_one_after_the_other_and_at_once():
    async def main():
        async with Running(delay=0.3) as run:
            run.kill("near")
            run.kill("far")
            await run.until(lambda: "cut" in run.told)
            await asyncio.sleep(0.1)
            run.kill("near")  # while another is on its way
            await run.until(lambda: run.system.recovering is None)
            assert run.told[-1] == "recovered"
            await run.echo(range(20))

    asyncio.run(main())
    assert not children()


def test_a_death_in_the_pause_before_a_start():
    async def main():
        async with Running(max_restarts=10, restart_window=60.0) as run:
            for turn in range(3):  # so that there is a pause
                run.kill("far")
                await run.recovered(turn + 1)
            run.kill("far")
            await run.until(lambda: run.told.count("cut") == 4)
            run.kill("near")
            await run.recovered(4)
            await run.echo(range(20))
            assert run.system.restarts == {"far": 4, "near": 1}

    asyncio.run(main())


def test_an_exception_and_a_stall_are_deaths_too(caplog):
    async def main():
        async with Running(stall_timeout=1.0) as run:
            run.user.context.outbox("near").send(Do("raise"))
            await run.recovered()
            await run.echo(range(5))
            run.user.context.outbox("near").send(Do("hang"))
            await run.recovered(2)
            await run.echo(range(5))
            run.kill("far", signal.SIGSTOP)
            await run.recovered(3)
            await run.echo(range(5))

    asyncio.run(main())
    assert "has stalled" in caplog.text
    assert "asked to" in caplog.text


def test_who_hangs_while_another_dies_is_replaced_too(caplog):
    async def main():
        async with Running(stall_timeout=1.0) as run:
            run.kill("near", signal.SIGSTOP)
            run.kill("far")
            await run.recovered()
            await run.echo(range(5))
            assert {*run.system.restarts} == {"near", "far"}

    asyncio.run(main())
    assert "has not restarted in time" in caplog.text


def test_a_channel_that_is_full_holds_nobody_up(monkeypatch):
    """A node that is stopped reads nothing: what it is told has no room one day."""
    monkeypatch.setattr(children_module, "_SEND_SECONDS", 1)

    async def main():
        async with Running(stall_timeout=None) as run:
            run.kill("near", signal.SIGSTOP)
            near = run.system._nodes.children.by_name["near"]
            with pytest.raises(OSError):
                while True:
                    near.connection.send(b"x" * 50_000)
            run.kill("far")
            await run.recovered()
            await run.echo(range(5))
            assert run.system.restarts == {"near": 1, "far": 1}

    asyncio.run(main())


def test_the_stall_that_is_one_death_too_many_is_told_as_one():
    async def main():
        async with Running(max_restarts=1, restart_window=60.0, stall_timeout=1.0) as run:
            run.kill("near")
            await run.recovered()
            run.kill("far", signal.SIGSTOP)
            await run.until(lambda: run.deaths)
            assert isinstance(run.deaths[0], NodeStalled)
            assert "far" in str(run.deaths[0])

    asyncio.run(main())


def test_who_is_never_ready_again_in_time_is_named():
    async def main():
        async with Running(delay=1.5, max_restarts=2, restart_window=60.0) as run:
            limit_restarts(run, 0.3)
            run.kill("far")
            await run.until(lambda: run.deaths)
            assert "not ready again after 0 s: the engine waited for node(s) far" in str(
                run.deaths[0]
            )
            assert run.system.restarts == {"far": 2}, "the culprit dies first, then the system"

    asyncio.run(main())


def test_a_node_that_hangs_while_it_starts_again_is_replaced(caplog):
    """Its deadline follows from what its own start took, not from start_timeout."""

    async def main():
        async with Running(stall_timeout=1.0) as run:
            run.kill("far")
            old = run.system.pids["far"]
            await run.until(lambda: run.system.pids.get("far", old) not in (old, 0))
            run.kill("far", signal.SIGSTOP)
            await run.recovered()
            await run.echo(range(5))
            assert run.system.restarts == {"far": 2}
            assert run.untold[-1].cause == "it hung"

    asyncio.run(main())
    assert "has not restarted in time" in caplog.text


@pytest.mark.parametrize(
    ("how", "told", "is_evidence"),
    [
        (signal.SIGKILL, "signal SIGKILL", False),
        (signal.SIGSEGV, "signal SIGSEGV", True),
        pytest.param(signal.SIGABRT, "signal SIGABRT", True, marks=pytest.mark.long),
    ],
)
def test_how_a_node_has_died_is_told(how, told, is_evidence, caplog):
    async def main():
        async with Running() as run:
            for turn in range(3):  # channel and kernel tell of it in either order
                run.kill("near", how)
                await run.recovered(turn + 1)
            assert {death.cause for death in run.untold} == {told}
            assert {death.node for death in run.untold} == {"near"}
            assert {death.is_evidence for death in run.untold} == {is_evidence}

    asyncio.run(main())
    assert "status None" not in caplog.text


def test_what_an_actor_raised_is_told_in_one_line_and_logged_whole(caplog):
    async def main():
        async with Running() as run:
            run.user.context.outbox("near").send(Do("raise"))
            await run.recovered()
            (death,) = run.untold
            assert death.cause == "actor near failed: ValueError: asked to"
            assert death.is_evidence

    asyncio.run(main())
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), True),
        (OSError(errno.EMFILE, "too many"), True),
        (OSError(errno.ENOENT, "nothing there"), False),
        (RuntimeError("can't start new thread"), True),
        (ValueError("can't start new thread"), False),
    ],
)
def test_what_the_machine_refuses(error, refused):
    assert is_out_of_resources(error) is refused
    assert Failed.of("near", error).is_resource_failure is refused


def test_deaths_with_a_cause_that_is_gone_are_not_counted():
    async def main():
        async with Running(max_restarts=2, restart_window=60.0) as run:
            run.explained = 1
            for turn in range(4):
                run.kill("near")
                await run.recovered(turn + 1)
            run.explained = 0
            for turn in range(2):
                run.kill("near")
                await run.recovered(turn + 5)
            run.kill("near")
            await run.until(lambda: run.deaths)

    asyncio.run(main())


def test_the_start_of_a_node_is_vetoed():
    async def main():
        async with Running() as run:
            asked = []

            async def veto(names):
                asked.append({*names})
                await asyncio.sleep(0)
                if "far" in names:
                    raise StartupFailed("its files are gone")

            recoveries = run.system._recoveries
            recoveries._callbacks = dataclasses.replace(recoveries._callbacks, before_restart=veto)
            run.kill("near")
            await run.recovered()
            run.kill("far")
            await run.until(lambda: run.deaths)
            assert asked == [{"near"}, {"far"}]
            assert "its files are gone" in str(run.deaths[0])

    asyncio.run(main())
    assert not children()


def test_time_in_which_a_node_computes_counts_less():
    watch = StartWatch({"busy": 1.0, "idle": 1.0, "ready": 1.0})
    late, cpu = {}, 0.0
    for tick in range(1, 200):
        cpu += 0.05
        for name in watch.tick(0.1, {"busy": cpu, "idle": 3.0}):
            late[name] = tick
    assert late["idle"] == 11
    assert late["busy"] == pytest.approx(100, abs=10)
    assert "ready" not in late


def test_nothing_is_waited_for_where_none_is_late():
    """All may have become ready in the moment in which the time was over."""

    async def main():
        async with Running() as run:
            assert run.system._nodes.children.pending() == []
            assert await run.system._nodes.children.wait_ended([], 60.0)

    asyncio.run(main())


def test_a_restart_may_take_a_multiple_of_the_start():
    assert start_limit(1.0, None) == start_limit(1.0, 60.0) == 15.0
    assert start_limit(1.0, 2.0) == 7.0
    assert start_limit(100.0, 2.0) == 502.0


def test_nothing_is_left_behind_however_often_somebody_dies():
    async def main():
        async with Running() as run:
            counts = []
            for turn in range(6):
                run.kill(NODES[turn % 2])
                await run.recovered(turn + 1)
                await run.echo(range(10))
                pids = [os.getpid(), *run.system.pids.values()]
                counts.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in pids])
                assert len(children()) == 2
            assert counts[1:] == counts[:1] * 5, counts

    before = descriptors()
    asyncio.run(main())
    assert descriptors() == before
    assert not children()


def test_one_death_too_many_is_the_systems():
    async def main():
        async with Running(max_restarts=2, restart_window=60.0) as run:
            for turn in range(2):
                run.kill("near")
                await run.recovered(turn + 1)
            run.kill("near")
            await run.until(lambda: run.deaths)
            assert isinstance(run.deaths[0], NodeDied)
            assert "near" in str(run.deaths[0])
        assert not children()

    asyncio.run(main())


def test_without_a_budget_a_stall_is_the_end():
    async def main():
        async with Running(max_restarts=0, stall_timeout=1.0) as run:
            run.kill("far", signal.SIGSTOP)
            await run.until(lambda: run.deaths)
            assert isinstance(run.deaths[0], NodeStalled)

    asyncio.run(main())


def test_closing_in_the_middle_leaves_nothing():
    async def main():
        async with Running(delay=0.5) as run:
            run.kill("far")
            await run.until(lambda: "cut" in run.told)
        assert not children()
        assert run.told == ["cut"]

    before = descriptors()
    asyncio.run(main())
    assert descriptors() == before


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(0, 5), st.floats(0.1, 50))
def test_no_window_holds_more_deaths_than_the_budget_allows(moments, most, window):
    budget, allowed = RestartBudget(most, window), []
    for moment in sorted(moments):
        recent = [one for one in allowed if one > moment - window]
        assert budget.spend(moment) == (len(recent) < most)
        if len(recent) < most:
            allowed.append(moment)
            assert budget.spent == len(recent) + 1
            assert budget.delay() == (0.0 if not recent else min(5.0, 0.05 * 2 ** len(recent)))
