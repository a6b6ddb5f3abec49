"""Nodes start, work, die and end; the same actors in one process and in several."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from nanoactor.runtime.errors import (
    LeaseEscaped,
    NodeDied,
    NodeStalled,
    NotUsableHere,
    PeerBroken,
    RuntimeFault,
    StartupFailed,
    UnsupportedPlatform,
)
from nanoactor.runtime.system import System
from nanoactor.runtime.topology import ActorSpec, EdgeSpec, NodeSpec, Topology
from nanoactor.runtime.wiring import Options
from tests.conftest import children, descriptors, survivors
from tests.promises import Delay, check_promise
from tests.runtime.actors import Do, Ping, Travelling


def topology(together=False, config="", environment=None, blocked=()):
    nodes = [NodeSpec("user", ("asker", "adder"))]
    if not together:
        child = NodeSpec("child", ("adder",), environment or {}, blocked)
        nodes = [NodeSpec("user", ("asker",)), child]
    return Topology(
        (
            ActorSpec("asker", "tests.runtime.actors:Asker", None),
            ActorSpec("adder", "tests.runtime.actors:Adder", config),
        ),
        tuple(nodes),
        (EdgeSpec("asker", ("adder",)), EdgeSpec("adder", ("asker",), bound=1000)),
        "user",
    )


class Running:
    """A started system, its asker, and what it died of."""

    def __init__(self, shape=None, **options):
        self.deaths = []
        self.busy = True
        options = Options(debug=True, **options)
        self.system = System(shape or topology(), options, self.deaths.append, lambda: self.busy)

    async def __aenter__(self):
        await self.system.start()
        self.asker = self.system.actor("asker")
        self.outbox = self.asker.context.outbox("adder")
        return self

    async def __aexit__(self, *_):
        await self.system.close()

    async def until(self, condition, seconds=30.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            await asyncio.sleep(0.005)


def ping(number, size=10):
    return Ping(number, np.full(size, number, np.int32))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("transport", ["ring", "queue"])
@pytest.mark.parametrize("delay", [0.0, 3.0])
def test_an_actor_cannot_tell_where_the_others_are(together, transport, delay):
    async def main():
        shape = topology(together)
        async with Running(shape, transport=transport, debug_delay_ms=delay) as run:
            for number in range(100):
                run.outbox.send(ping(number))
            await run.until(lambda: len(run.asker.pongs) == 100)
            assert [pong.number for pong in run.asker.pongs] == list(range(100))
            assert all(pong.total == 10 * pong.number for pong in run.asker.pongs)
            assert (run.asker.pongs[0].pid == os.getpid()) == together
            figures = await run.system.statistics()
            assert figures["adder"]["mailbox"]["handled"] == 100
            assert figures["adder"]["outboxes"]["asker"]["messages"] == 100
            assert figures["asker"]["mailbox"]["handled"] == 100
        assert not run.deaths

    asyncio.run(main())


def test_a_held_lease_survives_its_handler():
    async def main():
        async with Running() as run:
            run.outbox.send(Do("hold"))
            for number in range(50):
                run.outbox.send(ping(number, 1000))
            assert not run.outbox.ready  # the ring is full of records that are held
            await run.until(lambda: len(run.asker.pongs) == 50)
            assert [pong.total for pong in run.asker.pongs] == [1000 * n for n in range(50)]
            assert [pong.number for pong in run.asker.pongs] == list(range(50))

    asyncio.run(main())


def test_a_view_kept_without_its_lease_ends_the_node_with_the_reason():
    async def main():
        async with Running() as run:
            run.outbox.send(Do("keep"))
            run.outbox.send(ping(1))
            await run.until(lambda: run.deaths)
            assert LeaseEscaped.__name__ in str(run.deaths[0])

    asyncio.run(main())


@pytest.mark.parametrize("how", ["kill", "die", "raise"])
def test_death_is_noticed_within_100_ms_and_sends_raise(how):
    async def death():
        async with Running() as run:
            async with Delay() as delay:
                if how == "kill":
                    os.kill(run.system.pids["child"], signal.SIGKILL)
                else:
                    run.outbox.send(Do(how))
                await run.until(lambda: run.deaths)
            if how == "raise":
                assert "ValueError: asked to" in str(run.deaths[0])
            else:
                assert isinstance(run.deaths[0], NodeDied)
                assert re.search("SIGKILL|status 3", str(run.deaths[0]))
            with pytest.raises(PeerBroken, match="child|adder"):
                run.outbox.send(ping(1))
        assert len(run.deaths) == 1
        return delay

    check_promise(death)


def test_a_picklable_exception_is_raised_where_start_is_awaited():
    async def main():
        async with Running(topology(config="fail")):
            pass

    with pytest.raises(Travelling, match="no such weights") as caught:
        asyncio.run(main())
    assert "in setup" in caught.value.__cause__.__notes__[0]
    assert not children()


@pytest.mark.parametrize("together", [True, False])
def test_any_other_exception_at_start_names_the_actor(together):
    async def main():
        async with Running(topology(together, config="fail plainly")):
            pass

    with pytest.raises((StartupFailed, ValueError), match="something else"):
        asyncio.run(main())


def test_a_node_that_is_late_is_named_and_ended():
    async def main():
        async with Running(topology(config="hang"), start_timeout=1.0, stop_timeout=0.2):
            pass

    with pytest.raises(StartupFailed, match=r"not ready after 1 s: it waited for node\(s\) child"):
        asyncio.run(main())
    assert not children()


def test_a_blocked_module_cannot_be_imported_in_a_node():
    async def main():
        async with Running(topology(config="import", blocked=("wave",))):
            pass

    with pytest.raises(StartupFailed, match="wave must not be imported in this node"):
        asyncio.run(main())


def test_a_childs_log_records_reach_the_users_logging(caplog):
    async def main():
        async with Running():
            pass

    with caplog.at_level(logging.WARNING, "nanoactor"):
        asyncio.run(main())
    record = next(r for r in caplog.records if r.name == "nanoactor.adder")
    assert (record.getMessage(), record.processName) == ("set up well", "child")


def test_closing_leaves_no_process_thread_or_descriptor():
    async def main():
        threads, before = threading.active_count(), descriptors()
        for _ in range(3):
            async with Running() as run:
                run.outbox.send(ping(1))
                await run.until(lambda: run.asker.pongs)
            assert not children()
            assert (threading.active_count(), descriptors()) == (threads, before)
            await run.system.close()

    asyncio.run(main())


def test_a_node_that_does_not_stop_is_killed():
    async def main():
        async with Running(stop_timeout=0.3) as run:
            run.outbox.send(Do("sleep 30"))
            await asyncio.sleep(0.05)
            begin = time.monotonic()
        assert time.monotonic() - begin < 20, "its 30 s were waited for"
        assert not children()

    asyncio.run(main())


def test_another_loop_and_a_forked_process_are_refused():
    async def main():
        async with Running() as run:
            run.system.check_usable()

            def elsewhere():
                async def use():
                    run.system.check_usable()

                with pytest.raises(NotUsableHere, match="another event loop"):
                    asyncio.run(use())

            await asyncio.to_thread(elsewhere)
            run.system._affinity.pid -= 1
            with pytest.raises(NotUsableHere, match="another process"):
                run.system.check_usable()
            await run.system.close()  # a fork leaves the system of its parent alone
            run.system._affinity.pid += 1
            run.outbox.send(ping(1))
            await run.until(lambda: run.asker.pongs)

    asyncio.run(main())


def test_a_failed_start_leaves_no_descriptor():
    async def once():
        with pytest.raises(Travelling):
            async with Running(topology(config="fail")):
                pass

    async def main():
        await once()
        before = descriptors()
        await once()
        assert descriptors() == before

    asyncio.run(main())


def test_a_system_starts_once():
    async def main():
        async with Running() as run:
            with pytest.raises(RuntimeFault, match="can start only once"):
                await run.system.start()

    asyncio.run(main())


def test_closing_twice_at_once_waits_for_the_same_end():
    async def main():
        async with Running() as run:
            await asyncio.gather(run.system.close(), run.system.close())
            assert not children()

    asyncio.run(main())


def test_a_logging_handler_of_the_users_that_raises_does_no_harm(capsys):
    class Broken(logging.Handler):
        def handle(self, record):
            raise OSError("disk full")

    handler = Broken()
    logging.getLogger("nanoactor.adder").addHandler(handler)
    try:

        async def main():
            async with Running() as run:
                run.outbox.send(ping(1))
                await run.until(lambda: run.asker.pongs)

        asyncio.run(main())
    finally:
        logging.getLogger("nanoactor.adder").removeHandler(handler)
    assert "disk full" in capsys.readouterr().err


def test_statistics_may_be_asked_for_at_the_same_time():
    async def main():
        async with Running() as run:
            answers = await asyncio.gather(*(run.system.statistics() for _ in range(5)))
            assert all(set(answer) == {"asker", "adder"} for answer in answers)

    asyncio.run(main())


SCRIPT = """
import asyncio, os, sys, time
sys.path.insert(0, os.getcwd())
from tests.runtime.test_system import Running
async def main():
    async with Running() as run:
        print(run.system.pids["child"], flush=True)
        if sys.argv[1] == "raise":
            raise SystemExit(1)
        if sys.argv[1] == "block":
            time.sleep(60)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGKILL", "raise", "block"])
def test_no_child_survives_the_users_process(way, tmp_path):
    script = tmp_path / "user.py"
    script.write_text(textwrap.dedent(SCRIPT))
    user = subprocess.Popen(
        [sys.executable, script, way], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    pid = int(user.stdout.readline())
    time.sleep(0.05)
    if way != "raise":
        user.send_signal(getattr(signal, way, signal.SIGKILL))
    assert user.wait(30) != 0
    assert survivors([pid]) == []
    user.stdout.close()


def test_a_node_that_hangs_is_left_out_and_not_asked_for_ever():
    async def main():
        async with Running() as running:
            assert "adder" in await running.system.statistics()
            child = running.system.pids["child"]
            os.kill(child, signal.SIGSTOP)
            try:
                asked = [running.system.statistics() for _ in range(200)]
                begin = time.monotonic()
                assert all("adder" not in figures for figures in await asyncio.gather(*asked))
                waited = time.monotonic() - begin
                assert waited < 20, "each waits anew"
                begin = time.monotonic()
                assert "asker" in await running.system.statistics()
                again = time.monotonic() - begin
                assert again < waited / 2, "it waits for who is known to hang"
            finally:
                os.kill(child, signal.SIGCONT)
            async with asyncio.timeout(20):
                while "adder" not in await running.system.statistics():
                    await asyncio.sleep(0.02)

    asyncio.run(main())


# -- the watchdog, with processes; its judgement alone is tests/runtime/test_stall.py ------

PATIENT = 1.0
"""The stall timeout of these tests."""


async def alive(run):
    run.outbox.send(ping(1))
    await run.until(lambda: run.asker.pongs)
    assert not run.deaths


@pytest.mark.parametrize(
    "what", ["stop", "work 0.1", pytest.param("sleep 60", marks=pytest.mark.long)]
)
def test_a_stall_ends_the_system_and_logs_all_stacks(what, caplog):
    async def main():
        # A quarter of it is left for the stacks to arrive.
        async with Running(stall_timeout=3 * PATIENT) as run:
            if what == "stop":
                os.kill(run.system.pids["child"], signal.SIGSTOP)
            else:
                run.outbox.send(Do(what))
            await run.until(lambda: run.deaths, 60)
            (death,) = run.deaths
            assert isinstance(death, NodeStalled)
            assert "node child (pid" in str(death)
            assert ("adder has worked on the same task" in str(death)) == (what == "work 0.1")
            assert ("(stopped)" in str(death)) == (what == "stop")
        assert not children()

    with caplog.at_level(logging.ERROR, "nanoactor"):
        asyncio.run(main())
    assert "stacks of node user" in caplog.text
    assert ("stacks of node child" in caplog.text) == (what != "stop")
    assert ("time.sleep(float(do.what" in caplog.text) == (what == "sleep 60")


def test_a_node_that_computes_is_waited_for():
    """On a busy machine it may get no processor between two looks, so these are rarer here."""
    patient = 2 * PATIENT

    async def main():
        async with Running(stall_timeout=patient) as run:
            run.outbox.send(Do(f"compute {1.5 * patient}"))
            await alive(run)

    asyncio.run(main())


def test_a_user_who_blocks_the_loop_raises_no_alarm():
    async def main():
        async with Running(stall_timeout=PATIENT) as run:
            for _ in range(2):
                await asyncio.sleep(0.15 * PATIENT)
                time.sleep(1.5 * PATIENT)
            await alive(run)

    asyncio.run(main())


def test_nobody_is_watched_while_there_is_no_work():
    async def main():
        async with Running(stall_timeout=PATIENT) as run:
            run.busy = False
            child = run.system.pids["child"]
            os.kill(child, signal.SIGSTOP)
            await asyncio.sleep(1.5 * PATIENT)
            os.kill(child, signal.SIGCONT)
            run.busy = True
            await alive(run)

    asyncio.run(main())


PAUSED = """
import asyncio, os, sys
sys.path.insert(0, os.getcwd())
from tests.runtime.test_system import PATIENT, Running, alive
async def main():
    async with Running(stall_timeout=PATIENT) as run:
        print(run.system.pids["child"], flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await alive(run)
        print("well", flush=True)
asyncio.run(main())
"""


def test_a_pause_of_the_whole_group_raises_no_alarm(tmp_path):
    user = subprocess.Popen(
        [sys.executable, "-c", PAUSED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with user:
        assert int(user.stdout.readline())
        os.killpg(user.pid, signal.SIGSTOP)
        time.sleep(2 * PATIENT)
        os.killpg(user.pid, signal.SIGCONT)
        user.stdin.write("\n")
        user.stdin.flush()
        assert user.stdout.readline() == "well\n"
    assert user.returncode == 0


def test_a_start_that_hangs_says_who_is_late(monkeypatch, caplog):
    monkeypatch.setattr("nanoactor.runtime.nodes._LATE_WARNING_SECONDS", 0.5)

    async def main():
        async with Running(topology(config="hang"), start_timeout=2.0, stop_timeout=0.2):
            pass

    with caplog.at_level(logging.WARNING, "nanoactor"), pytest.raises(StartupFailed):
        asyncio.run(main())
    (late,) = [r.getMessage() for r in caplog.records if "not ready after" in r.getMessage()]
    assert re.search(r"node\(s\) child \(pid \d+, \w", late)


# -- signals, other loops, odd surroundings -----------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_node_ignores_what_a_group_is_sent(number):
    async def main():
        async with Running() as run:
            os.kill(run.system.pids["child"], number)
            await alive(run)

    asyncio.run(main())


@pytest.mark.parametrize("still_runs", [False, True])
def test_closing_from_another_loop_ends_everything(still_runs):
    before = descriptors()
    run = Running()

    async def close():
        await run.system.close()
        assert not children()

    async def main():
        async with run:
            await asyncio.to_thread(lambda: asyncio.run(close()))

    if still_runs:
        asyncio.run(main())
    else:
        asyncio.run(run.system.start())
        assert children()
        asyncio.run(close())
        asyncio.run(close())
    assert descriptors() == before


def test_a_path_entry_that_is_no_text_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, 7])

    async def main():
        async with Running() as run:
            await alive(run)

    asyncio.run(main())


def test_an_unknown_interpreter_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")

    async def main():
        with pytest.raises(UnsupportedPlatform, match=r"sys\.executable is empty"):
            await Running().system.start()

    asyncio.run(main())


def test_replaced_threads_are_a_typed_error(monkeypatch):
    import _thread

    def start_new_thread(*_):
        raise AssertionError

    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)

    async def main():
        with pytest.raises(UnsupportedPlatform, match="gevent"):
            await Running().system.start()

    asyncio.run(main())


CLOSED = """
import asyncio, os, sys
sys.path.insert(0, os.getcwd())
from tests.runtime.test_system import Running, alive
async def main():
    async with Running() as run:
        await alive(run)
    os.write(int(os.environ["WELL"]), b"well")
asyncio.run(main())
"""


@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "<&-", "<&- 1>&- 2>&-"])
def test_closed_standard_descriptors_do_no_harm(closed):
    read, write = os.pipe()
    command = f'exec "$0" -c "$1" {closed}'
    environment = {**os.environ, "WELL": str(write)}
    arguments = ["bash", "-c", command, sys.executable, CLOSED]
    with subprocess.Popen(arguments, env=environment, pass_fds=(write,)) as user:
        os.close(write)
        with open(read) as pipe:
            assert pipe.read() == "well"
    assert user.returncode == 0


def test_too_few_descriptors_are_a_typed_error():
    source = """
import asyncio, os, resource, sys
sys.path.insert(0, os.getcwd())
from tests.runtime.test_system import Running
resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))
try:
    asyncio.run(Running().system.start())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(
        "StartupFailed too many open files: this process may open at most 14"
    )
