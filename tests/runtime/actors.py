"""Actors and messages that the runtime's tests place into nodes."""

import importlib
import logging
import os
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.actor import Actor
from nanoactor.runtime.codec import message
from nanoactor.runtime.lease import Lease


@message(901)
class Ping:
    number: int
    data: NDArray[np.int32]


@message(902)
class Pong:
    number: int
    total: int
    pid: int


@message(903)
class Do:
    what: str


class Asker(Actor):
    """Lives in the test's process; the test reads what came back."""

    def __init__(self, config):
        self.pongs = deque()
        self.ready_calls = 0

    def handlers(self):
        return {Pong: self.pongs.append}

    def on_ready(self, outbox):
        self.ready_calls += 1


class Adder(Actor):
    """Sums what it is sent; misbehaves on request, each in its own way."""

    def __init__(self, config):
        self.config = config
        self.kept = []
        self.leases: list[Lease] = []
        self.mode = ""
        self.allowance = None

    def setup(self):
        if self.config == "fail":
            raise Travelling("no such weights")
        if self.config == "fail plainly":
            raise ValueError("something else")
        if self.config == "import":
            importlib.import_module("wave")
        if self.config == "hang":
            time.sleep(60)
        logging.getLogger("nanoactor.adder").warning("set up %s", "well")
        return {"pid": os.getpid()}

    def start(self, context, ready):
        super().start(context, ready)
        assert ready == {"asker": None, "adder": {"pid": os.getpid()}}

    def handlers(self):
        return {Ping: self.ping, Do: self.do}

    def ping(self, ping):
        if self.mode == "keep":
            self.kept.append(ping.data[1:])
        if self.mode == "hold":
            lease = self.context.hold_lease()
            if lease is not None:
                self.leases.append(lease)
                self.kept.append((ping.number, ping.data))
                self.context.call_later(0.002, self.answer_oldest)
                return
        total = int(ping.data.sum()) if ping.data.size else 0
        self.context.outbox("asker").send(Pong(ping.number, total, os.getpid()))

    def answer_oldest(self):
        number, data = self.kept.pop(0)
        total = int(data.sum())
        del data
        self.leases.pop(0).release()
        self.context.outbox("asker").send(Pong(number, total, os.getpid()))

    def do(self, do):
        if do.what == "die":
            os._exit(3)
        if do.what == "raise":
            raise ValueError("asked to")
        if do.what.startswith("sleep"):
            time.sleep(float(do.what.split()[1]))
        if do.what.startswith("compute"):
            end = time.monotonic() + float(do.what.split()[1])
            while time.monotonic() < end:
                pass
        if do.what.startswith("work"):
            self.allowance = float(do.what.split()[1])
        self.mode = do.what

    def progress(self):
        return None if self.allowance is None else (7, self.allowance)

    def statistics(self):
        return {"mode": self.mode}


class Travelling(Exception):
    picklable = True
