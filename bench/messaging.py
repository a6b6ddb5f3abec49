"""Measure what a message costs: our ring and queue compared with ZeroMQ, between two processes.

    python bench/messaging.py [--rounds 5] [--trips 2000] [--megabytes 256] [--out FILE]

Round trips of 64 bytes unpinned, across two cores and on one core; arrays of 1 MiB one way; the
broadcast to 1, 2, 4 and 8 readers. Contenders take turns within each round, so that a noisy
machine hurts all of them; medians over rounds are compared. ZeroMQ sends bare bytes, the ring
whole messages: encoded, decoded, checked against their schema.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import pickle
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
import zmq.asyncio

import nanoactor
from nanoactor.runtime.codec import Array, encode, message
from nanoactor.runtime.queue import create_queue
from nanoactor.runtime.ring import create_ring

MIB = 1 << 20
SMALL_RING, LARGE_RING = 1 << 16, 4 * MIB
SPIN_US = 30.0


@message(901)
class Note:
    """64 bytes, or the word that ends a run."""

    data: bytes


@message(902)
class Block:
    """A large array; `last` asks for an answer."""

    last: bool
    data: Array


@message(903)
class Spent:
    """A peer's use: seconds of CPU, and a sum that shows that it read."""

    cpu: float
    total: float


PAYLOAD = b"x" * 64
END = b"end"


# -- both ends of a pair of our transports ------------------------------------------------


class Pair:
    """One edge in either direction, as one process sees it."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.sender, self.receiver = sender.open(), receiver.open()
        self.loop = asyncio.get_running_loop()

    def start(self, deliver) -> None:
        self.receiver.start(self.loop, deliver, fatal)

    async def send(self, value: Any) -> None:
        encoded = encode(value)
        while not self.sender.try_send(encoded):
            room = self.loop.create_future()
            self.sender.when_writable(self.loop, lambda room=room: room.set_result(None))
            await room

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def fatal(error: BaseException) -> None:
    print(f"failed: {error!r}", file=sys.stderr)
    os._exit(1)


class Inbox:
    """Messages to be awaited one at a time."""

    def __init__(self, pair: Pair) -> None:
        self._waiter: asyncio.Future | None = None
        self._loop = pair.loop
        self._got: list[Any] = []
        pair.start(self._deliver)

    def _deliver(self, value, lease, sent) -> bool:
        self._got.append(value)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return False

    async def next(self) -> Any:
        while not self._got:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._got.pop(0)


def create(kind: str, capacity: int, readers: int = 1):
    if kind == "queue":
        return create_queue(readers, capacity)
    return create_ring(readers, capacity, spin_us=SPIN_US if kind == "spin" else 0.0)


# -- the peer -----------------------------------------------------------------------------


async def echo(pair: Pair, awaited: bool) -> None:
    """Send back what comes; at the end the CPU time that this took."""
    begin = time.process_time()
    if awaited:
        inbox = Inbox(pair)
        while (note := await inbox.next()).data != END:
            pair.sender.try_send(encode(note))
    else:
        over = pair.loop.create_future()

        def deliver(note, lease, sent) -> bool:
            if note.data == END:
                over.set_result(None)
            else:
                pair.sender.try_send(encode(note))
            return False

        pair.start(deliver)
        await over
    await pair.send(Spent(time.process_time() - begin, 0.0))


async def swallow(pair: Pair, sums: bool) -> None:
    """Read arrays, in place, and answer the last."""
    begin, total = time.process_time(), 0.0
    over = pair.loop.create_future()

    def deliver(value, lease, sent) -> bool:
        nonlocal total
        if isinstance(value, Note):
            over.set_result(None)
            return False
        total += float(value.data.sum()) if sums else float(value.data[0])
        if value.last:
            pair.sender.try_send(encode(Spent(time.process_time() - begin, total)))
        return False

    pair.start(deliver)
    await over


def zmq_context():
    context = zmq.Context()
    return context, context.socket(zmq.PAIR)


def zmq_echo(address: str) -> None:
    context, socket = zmq_context()
    socket.connect(address)
    begin = time.process_time()
    while (data := socket.recv()) != END:
        socket.send(data)
    socket.send(pickle.dumps(time.process_time() - begin))
    socket.close()
    context.term()


async def zmq_echo_async(address: str) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    begin = time.process_time()
    while (data := await socket.recv()) != END:
        await socket.send(data)
    await socket.send(pickle.dumps(time.process_time() - begin))
    socket.close()
    context.term()


def zmq_swallow(address: str, count: int, sums: bool, copy: bool) -> None:
    context, socket = zmq_context()
    socket.connect(address)
    begin, total = time.process_time(), 0.0
    while True:
        for _ in range(count):
            frame = socket.recv(copy=copy)
            buffer = frame if copy else frame.buffer
            if len(buffer) < MIB:
                socket.close()
                context.term()
                return
            data = np.frombuffer(buffer, np.float32)
            total += float(data.sum()) if sums else float(data[0])
        socket.send(pickle.dumps((time.process_time() - begin, total)))


def peer(role: str, argument: str) -> None:
    options = pickle.loads(bytes.fromhex(argument))
    if options["cpu"] is not None:
        os.sched_setaffinity(0, {options["cpu"]})
    if role == "zmq-sync":
        zmq_echo(options["address"])
    elif role == "zmq-asyncio":
        uvloop.run(zmq_echo_async(options["address"]))
    elif role == "zmq-swallow":
        zmq_swallow(options["address"], options["count"], options["sums"], options["copy"])
    else:

        async def run() -> None:
            pair = Pair(*options["ends"])
            if role == "swallow":
                await swallow(pair, options["sums"])
            else:
                await echo(pair, options["awaited"])
            pair.close()

        uvloop.run(run())


@contextlib.contextmanager
def started(role: str, ends: tuple = (), **options: Any):
    """A peer process; its descriptors are ours no longer."""
    descriptors = [fd for end in ends for fd in end.descriptors]
    argument = pickle.dumps({"cpu": None, "ends": ends, **options}).hex()
    process = subprocess.Popen(
        [sys.executable, __file__, "--peer", role, argument], pass_fds=descriptors
    )
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        yield process
        process.wait(10)
    finally:
        process.kill()
        process.wait()


# -- round trips --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trips:
    """One contender's round trips of one round, in µs."""

    p50: float
    p99: float
    per_second: float
    cpu_us: float
    """Of both processes, per round trip."""

    @classmethod
    def of(cls, times: list[float], cpu: float) -> Trips:
        us = np.array(times) * 1e6
        p50, p99 = np.percentile(us, [50, 99])
        return cls(float(p50), float(p99), float(1e6 / us.mean()), cpu / len(times) * 1e6)


async def ours(kind: str, awaited: bool, trips: int, cpu: int | None) -> Trips:
    there, (their_in,) = create(kind, SMALL_RING)
    back, (our_in,) = create(kind, SMALL_RING)
    with started("echo", (back, their_in), awaited=awaited, cpu=cpu):
        pair = Pair(there, our_in)
        note = Note(PAYLOAD)
        times: list[float] = []
        if awaited:
            inbox = Inbox(pair)

            async def trip() -> None:
                await pair.send(note)
                await inbox.next()

            await trip()  # the peer is up
            for _ in range(200):
                await trip()
            used = time.process_time()
            for _ in range(trips):
                begin = time.perf_counter()
                await trip()
                times.append(time.perf_counter() - begin)
            used = time.process_time() - used
            await pair.send(Note(END))
            spent = await inbox.next()
        else:
            times, used, spent = await _callback_trips(pair, note, trips)
        pair.close()
    return Trips.of(times, used + spent.cpu * trips / (trips + 201))


async def _callback_trips(pair: Pair, note: Note, trips: int):
    """Each answer's handler sends the next note: what an actor does."""
    over = pair.loop.create_future()
    times: list[float] = []
    state = {"left": trips + 201, "begin": 0.0, "used": 0.0}

    def deliver(value, lease, sent) -> bool:
        now = time.perf_counter()
        if isinstance(value, Spent):
            over.set_result(value)
            return False
        state["left"] -= 1
        if state["left"] < trips:
            times.append(now - state["begin"])
        elif state["left"] == trips:
            state["used"] = time.process_time()
        if state["left"]:
            state["begin"] = time.perf_counter()
            pair.sender.try_send(encode(note))
        else:
            state["used"] = time.process_time() - state["used"]
            pair.sender.try_send(encode(Note(END)))
        return False

    pair.start(deliver)
    pair.sender.try_send(encode(note))
    spent = await over
    return times, state["used"], spent


def zmq_sync(trips: int, cpu: int | None) -> Trips:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/pair"
        context, socket = zmq_context()
        socket.bind(address)
        with started("zmq-sync", address=address, cpu=cpu):
            times = []
            for number in range(trips + 201):
                if number == 201:
                    used = time.process_time()
                begin = time.perf_counter()
                socket.send(PAYLOAD)
                socket.recv()
                times.append(time.perf_counter() - begin)
            used = time.process_time() - used
            socket.send(END)
            theirs = pickle.loads(socket.recv())
        socket.close()
        context.term()
    return Trips.of(times[201:], used + theirs * trips / (trips + 201))


async def zmq_async(trips: int, cpu: int | None) -> Trips:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/pair"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.bind(address)
        with started("zmq-asyncio", address=address, cpu=cpu):
            times = []
            for number in range(trips + 201):
                if number == 201:
                    used = time.process_time()
                begin = time.perf_counter()
                await socket.send(PAYLOAD)
                await socket.recv()
                times.append(time.perf_counter() - begin)
            used = time.process_time() - used
            await socket.send(END)
            theirs = pickle.loads(await socket.recv())
        socket.close()
        context.term()
    return Trips.of(times[201:], used + theirs * trips / (trips + 201))


def round_trips(trips: int, cpu: int | None) -> dict[str, Trips]:
    return {
        "ring, callback": uvloop.run(ours("ring", False, trips, cpu)),
        "zmq sync": zmq_sync(trips, cpu),
        "ring, awaited": uvloop.run(ours("ring", True, trips, cpu)),
        "zmq.asyncio": uvloop.run(zmq_async(trips, cpu)),
        "ring, 30 us spin": uvloop.run(ours("spin", False, trips, cpu)),
        "queue": uvloop.run(ours("queue", False, trips, cpu)),
    }


# -- large arrays -------------------------------------------------------------------------


def sources(count: int) -> list[Array]:
    return [np.full(MIB // 4, index + 1, np.float32) for index in range(count)]


async def ring_arrays(kind: str, arrays: list[Array], count: int, sums: bool) -> float:
    """µs per array, from the first send to the answer to the last."""
    there, (their_in,) = create(kind, LARGE_RING)
    back, (our_in,) = create("ring", SMALL_RING)
    with started("swallow", (back, their_in), sums=sums):
        pair = Pair(there, our_in)
        inbox = Inbox(pair)

        async def run(number: int) -> float:
            begin = time.perf_counter()
            for index in range(number):
                await pair.send(Block(index == number - 1, arrays[index % len(arrays)]))
            await inbox.next()
            return (time.perf_counter() - begin) / number * 1e6

        await run(16)
        result = await run(count)
        await pair.send(Note(END))
        pair.close()
    return result


def zmq_arrays(arrays: list[Array], count: int, sums: bool, copy: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/pair"
        context, socket = zmq_context()
        socket.bind(address)
        options = {"address": address, "count": count, "sums": sums, "copy": copy}
        with started("zmq-swallow", **options):
            for _ in range(2):  # the first round warms
                begin = time.perf_counter()
                for index in range(count):
                    socket.send(arrays[index % len(arrays)], copy=copy)
                socket.recv()
                result = (time.perf_counter() - begin) / count * 1e6
            socket.send(END)
        socket.close()
        context.term()
    return result


def large_arrays(count: int) -> dict[str, float]:
    found = {}
    for label, arrays, sums in (
        ("cached source", sources(1), False),
        ("64 fresh sources, summed", sources(64), True),
    ):
        found[f"{label}: ring"] = uvloop.run(ring_arrays("ring", arrays, count, sums))
        found[f"{label}: ring, spin"] = uvloop.run(ring_arrays("spin", arrays, count, sums))
        found[f"{label}: zmq"] = min(
            zmq_arrays(arrays, count, sums, copy) for copy in (False, True)
        )
        found[f"{label}: queue"] = uvloop.run(ring_arrays("queue", arrays, count, sums))
    return found


# -- broadcast ----------------------------------------------------------------------------


async def broadcast(readers: int, value: Any, last: Any, burst: int, bursts: int) -> float:
    """µs of the writer's CPU per message, in bursts that every reader acknowledges."""
    there, their_ins = create("ring", LARGE_RING, readers)
    async with contextlib.AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        answers: list[Any] = []
        waiter: list[asyncio.Future] = []

        def deliver(value, lease, sent) -> bool:
            answers.append(value)
            if len(answers) == readers:
                waiter[0].set_result(None)
            return False

        ours = []
        for their_in in their_ins:
            back, (our_in,) = create("ring", SMALL_RING)
            stack.enter_context(started("swallow", (back, their_in), sums=False))
            ours.append(our_in.open())
            ours[-1].start(loop, deliver, fatal)
        sender = there.open()
        encoded, encoded_last = encode(value), encode(last)

        async def run_burst() -> float:
            waiter[:], answers[:] = [loop.create_future()], []
            used = 0.0
            for record in [encoded] * (burst - 1) + [encoded_last]:
                begin = time.thread_time()
                sent = sender.try_send(record)
                used += time.thread_time() - begin
                while not sent:
                    await asyncio.sleep(0)
                    select.select([], [], [], 0.0002)
                    begin = time.thread_time()
                    sent = sender.try_send(record)
                    used += time.thread_time() - begin
            await waiter[0]
            return used / burst * 1e6

        await run_burst()
        found = [await run_burst() for _ in range(bursts)]
        sender.try_send(encode(Note(END)))
        for receiver in ours:
            receiver.close()
    sender.close()
    return statistics.median(found)


def broadcasts() -> dict[str, float]:
    small = np.zeros(16, np.float32)
    large = np.zeros(MIB // 4, np.float32)
    found = {}
    for readers in (1, 2, 4, 8):
        for label, data, burst in (("64 B", small, 512), ("1 MiB", large, 3)):
            key = f"{label} to {readers}"
            messages = Block(False, data), Block(True, data)
            found[key] = uvloop.run(broadcast(readers, *messages, burst, 9))
    return found


# -- all of it ----------------------------------------------------------------------------


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in rounds), 2) for key in rounds[0]}


def summarise(rounds: list[dict[str, Trips]]) -> dict[str, dict[str, float]]:
    return {name: medians([dataclasses.asdict(r[name]) for r in rounds]) for name in rounds[0]}


def ratios(result: dict) -> dict[str, float]:
    """Return what we promise, as ratios of medians."""

    def p50(place: str, name: str) -> float:
        return result["round_trip_64B"][place][name]["p50"]

    arrays, writer = result["arrays_1MiB_us"], result["broadcast_writer_cpu_us"]
    best = min(p50("unpinned", name) for name in ("ring, callback", "ring, awaited"))
    spin = p50("two cores", "ring, 30 us spin")
    return {
        "64 B unpinned, zmq sync / ring": p50("unpinned", "zmq sync") / best,
        "64 B unpinned, zmq.asyncio / ring": p50("unpinned", "zmq.asyncio") / best,
        "64 B two cores, zmq sync / ring with spin": p50("two cores", "zmq sync") / spin,
        "64 B two cores, zmq.asyncio / ring with spin": p50("two cores", "zmq.asyncio") / spin,
        "1 MiB cached, zmq / ring": arrays["cached source: zmq"] / arrays["cached source: ring"],
        "1 MiB cached, zmq / ring with spin": arrays["cached source: zmq"]
        / arrays["cached source: ring, spin"],
        "1 MiB fresh and summed, zmq / ring with spin": arrays["64 fresh sources, summed: zmq"]
        / arrays["64 fresh sources, summed: ring, spin"],
        "1 MiB fresh and summed, zmq / ring": arrays["64 fresh sources, summed: zmq"]
        / arrays["64 fresh sources, summed: ring"],
        "us of the writer's CPU per extra reader, 64 B": (writer["64 B to 8"] - writer["64 B to 1"])
        / 7,
        "1 MiB to 4 readers / to 1": writer["1 MiB to 4"] / writer["1 MiB to 1"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    places = {
        "unpinned": (None, None),
        "two cores": (cores[0], cores[-1]),
        "one core": (cores[0],) * 2,
    }
    trips: dict[str, list[dict[str, Trips]]] = {place: [] for place in places}
    arrays, writers = [], []
    for number in range(args.rounds):
        for place, (mine, theirs) in places.items():
            os.sched_setaffinity(0, {mine} if mine is not None else cores)
            trips[place].append(round_trips(args.trips, theirs))
        os.sched_setaffinity(0, cores)
        arrays.append(large_arrays(args.megabytes))
        writers.append(broadcasts())
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "question": "what does a message cost, beside ZeroMQ?",
        "command": f"python bench/messaging.py --rounds {args.rounds} --trips {args.trips} "
        f"--megabytes {args.megabytes}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "nanoactor": nanoactor.__version__,
            "python": platform.python_version(),
            "uvloop": uvloop.__version__,
            "pyzmq": zmq.pyzmq_version(),
            "zmq": zmq.zmq_version(),
            "numpy": np.__version__,
        },
        "cores": len(cores),
        "round_trip_64B": {place: summarise(rounds) for place, rounds in trips.items()},
        "arrays_1MiB_us": medians(arrays),
        "broadcast_writer_cpu_us": medians(writers),
    }
    result["ratios"] = {name: round(value, 2) for name, value in ratios(result).items()}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
