"""The ring under stress: one writing process, several reading ones, one of which may be killed.

    python -m tests.runtime.ring_stress --records 1000000

Sizes are log-uniform up to the largest record that the ring takes, so that records begin at
every 64-byte offset of it; readers are fast, slow and moody. Every reader checks the number of
each record and its length, and of a tenth of them every byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import random
import select
import subprocess
import sys
import time
import zlib

import numpy as np

from nanoactor.runtime.codec import Array, encode, message
from nanoactor.runtime.ring import create_ring

DOOM = 2000
CAPACITY = 1 << 14


@message(990)
class Parcel:
    """A record of a random size."""

    number: int
    crc: int
    data: Array


def parcels(seed: int):
    """(number, data) without end; the same for whoever has the seed."""
    rng = random.Random(seed)
    noise = np.frombuffer(rng.randbytes(CAPACITY), np.uint8)
    largest = CAPACITY // 2 - 256
    number = 0
    while True:
        size = int(2 ** (rng.random() * np.log2(largest)))
        start = rng.randrange(CAPACITY - size)
        yield number, noise[start : start + size]
        number += 1


def write(end, records: int, seed: int, begin: int = 0) -> dict:
    """Send so many records; how many were sent when a reader stayed away for five seconds."""
    sender = end.open()
    spaces = [space for _, space in end.events]
    sent, offsets = 0, set()
    source = parcels(seed)
    while sent < records:
        number, data = next(source)
        crc = zlib.crc32(data) if number % 10 == 0 else 0
        encoded = encode(Parcel(number, crc, data), inline=0 if number % 3 else 1 << 20)
        while not sender.try_send(encoded):
            if not select.select(spaces, [], [], 5)[0]:
                return {"sent": sent, "offsets": len(offsets), "stuck": True}
        offsets.add(sender._written % CAPACITY)
        sent += 1
    return {"sent": sent, "offsets": len(offsets), "stuck": False}


def read(end, records: int, seed: int, mood: str) -> None:
    """Check every record; a line on standard output says how many, or what was wrong."""
    expected = parcels(seed)
    seen, wrong = 0, []
    last = time.monotonic()

    def deliver(value, lease, sent) -> bool:
        nonlocal seen, last
        number, data = next(expected)
        if value.number != number or len(value.data) != len(data):
            wrong.append(f"record {value.number} of {len(value.data)} where {number} was due")
        elif number % 10 == 0 and (value.crc != zlib.crc32(value.data)):
            wrong.append(f"record {number} is torn")
        seen += 1
        last = time.monotonic()
        if mood == "doomed" and seen == DOOM:
            print("kill me", flush=True)
        if (mood == "slow" and seen % 500 == 0) or (mood == "moody" and seen % 7919 == 0):
            time.sleep(0.0005 if mood == "slow" else 0.05)
        return False

    async def main() -> None:
        receiver = end.open()
        failures: list[BaseException] = []
        receiver.start(asyncio.get_running_loop(), deliver, failures.append)
        while seen < records and not wrong and not failures:
            # Once the writer has ended, so has the reader: a while after the last record.
            patience = 3 if select.select([sys.stdin], [], [], 0)[0] else 60
            if time.monotonic() - last > patience:
                break
            await asyncio.sleep(0.02)
        receiver.close()
        wrong.extend(map(repr, failures))

    asyncio.run(main())
    print(json.dumps({"seen": seen, "wrong": wrong[:3]}), flush=True)


def run(records: int, moods: list[str], seed: int = 1) -> dict:
    """Writer and readers in processes of their own. A first reader that is "doomed" is killed once
    it has seen `DOOM` records: the others must have all that was sent, and the writer must not
    hang."""
    end, readers = create_ring(len(moods), CAPACITY)
    with contextlib.ExitStack() as stack:

        def start(*arguments, descriptors):
            pickled = pickle.dumps(arguments).hex()
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.ring_stress", "--part", pickled],
                pass_fds=descriptors,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        processes = [
            start(reader, records, seed, mood, descriptors=reader.descriptors)
            for reader, mood in zip(readers, moods, strict=True)
        ]
        writer = start(end, records, seed, descriptors=end.descriptors)
        for descriptor in (*end.descriptors, *(fd for r in readers for fd in r.descriptors)):
            os.close(descriptor)
        if moods[0] == "doomed":
            assert processes[0].stdout.readline()
            processes[0].kill()
        wrote = json.loads(writer.communicate(timeout=1200)[0])
        for process in processes:
            process.stdin.close()
            process.stdin = None
        told = [json.loads(p.communicate(timeout=60)[0] or "null") for p in processes]
    return {"writer": wrote, "readers": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--part", help="for the processes that this one starts")
    args = parser.parse_args()
    if args.part:
        end, *rest = pickle.loads(bytes.fromhex(args.part))
        if hasattr(end, "events"):
            print(json.dumps(write(end, *rest)), flush=True)
        else:
            read(end, *rest)
        return
    begin = time.monotonic()
    result = run(args.records, ["fast", "slow"])
    print(json.dumps(result), f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
