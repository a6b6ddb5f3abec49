"""One contract for every transport: in order, once, whole; no wait in the writer."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoactor.runtime.codec import HEADER, encode
from nanoactor.runtime.errors import (
    LeaseEscaped,
    OutboxOverflow,
    PeerBroken,
    RecordTooLarge,
    RingCorrupted,
)
from nanoactor.runtime.outbox import RemoteOutbox
from nanoactor.runtime.queue import create_queue
from nanoactor.runtime.ring import create_ring, ring_capacity
from nanoactor.runtime.tracing import Track
from tests.runtime.actors import Do, Ping

CAPACITY = 4096


class Line:
    """A transport with all its ends in this process and on this loop."""

    def __init__(self, kind, readers=1, capacity=CAPACITY):
        self.kind = kind
        create = {"ring": create_ring, "queue": create_queue}[kind]
        sender, receivers = create(readers, capacity, debug=True)
        self.sender = sender.open()
        self.receivers = [end.open() for end in receivers]
        self.got = [[] for _ in receivers]
        self.failures = []

    def start(self, index=0, deliver=None):
        def collect(value, lease, sent):
            data = value.data.tolist() if isinstance(value, Ping) else value.what
            self.got[index].append(data)
            return False

        loop = asyncio.get_running_loop()
        self.receivers[index].start(loop, deliver or collect, self.failures.append)

    async def until(self, condition, seconds=10):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            assert not self.failures, self.failures
            await asyncio.sleep(0.001)

    def close(self):
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(params=["ring", "queue"])
def kind(request):
    return request.param


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def runner(coroutine):
        with asyncio.Runner(loop_factory=factory) as loop:
            return loop.run(coroutine)

    return runner


def ping(number, size):
    return Ping(number, np.arange(number, number + size, dtype=np.int32))


def outbox(line, bound=None, on_ready=lambda box: None):
    loop = asyncio.get_running_loop()
    return RemoteOutbox(
        "out", line.sender, loop, bound, on_ready, line.failures.append, Track("out")
    )


@pytest.mark.parametrize("readers", [1, 3])
def test_every_record_arrives_once_in_order_and_whole(kind, run, readers):
    async def main():
        line = Line(kind, readers)
        for index in range(readers):
            line.start(index)
        box = outbox(line)
        rng = random.Random(1)
        sizes = [rng.choice([0, 1, 7, 100, 480]) for _ in range(500)]
        for number, size in enumerate(sizes):
            box.send(ping(number, size))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await line.until(lambda: all(len(got) == len(sizes) for got in line.got))
        expected = [list(range(n, n + s)) for n, s in enumerate(sizes)]
        assert all(got == expected for got in line.got)
        assert box.statistics()["messages"] == len(sizes)
        assert box.statistics()["high_water"] > 0
        line.close()

    run(main())


def test_a_full_edge_never_blocks_the_sender_and_says_when_it_is_ready(kind, run):
    async def main():
        line = Line(kind)
        ready = []
        box = outbox(line, on_ready=lambda box: ready.append(box.ready))
        for number in range(400):
            box.send(ping(number, 100))
        assert not box.ready
        line.start()
        await line.until(lambda: len(line.got[0]) == 400)
        await line.until(lambda: ready == [True])
        line.close()

    run(main())


def test_the_slowest_reader_of_a_broadcast_decides_what_may_be_overwritten(kind, run):
    async def main():
        line = Line(kind, readers=2)
        line.start(0)
        box = outbox(line)
        for number in range(200):
            box.send(ping(number, 60))
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert len(line.got[0]) < 200 or kind == "queue"  # the other has not read anything
        line.start(1)
        await line.until(lambda: all(len(got) == 200 for got in line.got))
        expected = [list(range(n, n + 60)) for n in range(200)]
        assert line.got == [expected, expected]
        line.close()

    run(main())


def test_the_outbox_holds_to_its_bound(kind, run):
    async def main():
        line = Line(kind)
        box = outbox(line, bound=3)
        with pytest.raises(OutboxOverflow, match="bound is 3"):
            for number in range(5000):
                box.send(ping(number, 480))
        box.mark_broken("node x died")
        with pytest.raises(PeerBroken, match="node x died"):
            box.send(ping(0, 1))
        line.start()
        await asyncio.sleep(0.01)
        line.close()

    run(main())


def test_a_record_larger_than_the_edge_can_carry_is_refused_when_sent(kind, run):
    async def main():
        line = Line(kind)
        line.start()
        box = outbox(line)
        with pytest.raises(RecordTooLarge, match="limit of the edge is 2048"):
            box.send(ping(0, 600))
        box.send(ping(0, 400))
        await line.until(lambda: line.got[0] == [list(range(400))])
        line.close()

    run(main())


def test_a_large_record_is_refused_also_behind_others(kind, run):
    async def main():
        line = Line(kind)
        box = outbox(line)
        for number in range(400):
            box.send(ping(number, 100))
        with pytest.raises(RecordTooLarge, match="limit of the edge is 2048"):
            box.send(ping(0, 600))
        box.send(ping(7, 1))
        line.start()
        await line.until(lambda: len(line.got[0]) == 401)
        line.close()

    run(main())


def test_what_fails_while_an_outbox_empties_is_fatal_to_its_node(kind, run):
    async def main():
        line = Line(kind)

        def fail(box):
            raise ValueError("in on_ready")

        box = outbox(line, on_ready=fail)
        for number in range(400):
            box.send(ping(number, 100))
        line.start()
        for _ in range(500):
            await asyncio.sleep(0.002)
            if line.failures:
                break
        assert str(line.failures) == "[ValueError('in on_ready')]"
        line.close()

    run(main())


def test_a_held_lease_keeps_its_record_and_releases_in_order(run):
    async def main():
        line = Line("ring")
        held = []

        def deliver(value, lease, sent):
            held.append((value, lease))
            return True

        line.start(0, deliver)
        box = outbox(line)
        for number in range(20):
            box.send(ping(number, 100))
        await asyncio.sleep(0.01)
        first = len(held)
        assert 0 < first < 20  # the ring is full of held records
        for number, (value, _) in enumerate(held):
            assert value.data.tolist() == list(range(number, number + 100))
        while len(held) > 1:  # the youngest first: no space returns before the oldest goes
            value, lease = held.pop()
            del value
            lease.release()
            lease.release()
        await asyncio.sleep(0.01)
        assert len(held) == 1
        value, lease = held.pop()
        del value
        lease.release()
        await line.until(lambda: len(held) == min(first, 20 - first))
        line.close()

    run(main())


@pytest.mark.parametrize("view", ["array", "slice", "torch"])
def test_a_view_that_escapes_its_lease_is_caught(view, run):
    if view == "torch":
        torch = pytest.importorskip("torch")

    async def main():
        line = Line("ring")
        kept = []

        def deliver(value, lease, sent):
            data = value.data
            if view == "torch":
                writable = data.view()
                writable.flags.writeable = True
                kept.append(torch.from_numpy(writable)[3:])
            else:
                kept.append(data if view == "array" else data[3:5].reshape(2, 1))
            return False

        line.start(0, deliver)
        outbox(line).send(ping(0, 100))
        await asyncio.sleep(0.01)
        assert isinstance(line.failures[0], LeaseEscaped)
        line.close()

    run(main())


def test_released_space_is_overwritten_in_debug_mode(run):
    async def main():
        line = Line("ring")
        line.start()
        box = outbox(line)
        for number in range(64):
            box.send(Do("x" * number))
            await asyncio.sleep(0)
        await line.until(lambda: len(line.got[0]) == 64)
        for _ in range(20):
            box.send(ping(0, 480))
            await asyncio.sleep(0)
        await line.until(lambda: len(line.got[0]) == 84)
        line.sender._collect_credits()
        assert b"\xdb" * 1024 in bytes(line.sender._view[:CAPACITY])
        line.close()

    run(main())


def test_overwritten_memory_is_noticed(run):
    async def main():
        line = Line("ring")
        line.sender.try_send(encode(ping(0, 10)))
        line.sender._view[HEADER.size + 3] ^= 0xFF
        line.start()
        await asyncio.sleep(0.01)
        assert isinstance(line.failures[0], RingCorrupted)
        line.close()

    run(main())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2048 - 128), min_size=1, max_size=200), st.integers(0, 63))
def test_no_sequence_of_sizes_deadlocks_the_ring(sizes, shift):
    """Also the one that a reader which credits lazily dies of: 0.49 of the capacity, idle."""

    async def main():
        line = Line("ring")
        line.start()
        box = outbox(line)
        for _ in range(shift):
            box.send(Do(""))
            await asyncio.sleep(0)
        for size in sizes:
            box.send(Do("y" * size))
        await line.until(lambda: len(line.got[0]) == shift + len(sizes))
        line.close()

    asyncio.run(main())


def test_capacity_fits_the_largest_record():
    assert ring_capacity(1) == 4096
    assert ring_capacity(2048) == 4096
    assert ring_capacity(2049) == 8192


WRITER = """
import sys, zlib, random, numpy as np, pickle, os, select
sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1]))
from nanoactor.runtime.codec import encode
from tests.runtime.actors import Ping
end = pickle.loads(bytes.fromhex(sys.argv[2]))
sender = end.open()
rng = random.Random(5)
for number in range(int(sys.argv[3])):
    size = int(2 ** (rng.random() * 13.9))
    data = np.frombuffer(rng.randbytes(4 * size), np.int32)
    encoded = encode(Ping(zlib.crc32(data), data))
    while not sender.try_send(encoded):
        select.select([space for _, space in end.events], [], [], 1)
"""


def test_two_processes_agree_on_every_byte(run):
    """Log-uniform sizes up to the limit; the writer is another process (full size in bench)."""
    import pickle

    count = 4000

    async def main():
        sender, (receiver,) = create_ring(1, 1 << 17)
        arguments = [pickle.dumps(v).hex() for v in (sys.path, sender)]
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments, str(count)], pass_fds=sender.descriptors
        )
        for descriptor in sender.descriptors:
            os.close(descriptor)
        seen, failures = [], []

        def deliver(value, lease, sent):
            assert zlib.crc32(value.data) == value.number
            seen.append(value.data.size)
            if len(seen) % 97 == 0:
                time.sleep(0.001)
            return False

        reader = receiver.open()
        reader.start(asyncio.get_running_loop(), deliver, failures.append)
        end = time.monotonic() + 60
        while len(seen) < count and not failures and time.monotonic() < end:
            await asyncio.sleep(0.01)
        writer.wait(10)
        reader.close()
        assert not failures
        assert len(seen) == count
        assert max(seen) > 10_000

    run(main())


def test_no_thread_or_descriptor_stays_behind(kind):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    async def main():
        line = Line(kind, readers=2)
        line.start(0)
        line.start(1)
        outbox(line).send(ping(0, 10))
        await line.until(lambda: all(line.got))
        line.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    threads, before = threading.active_count(), descriptors()
    asyncio.run(main())
    assert (threading.active_count(), descriptors()) == (threads, before)
