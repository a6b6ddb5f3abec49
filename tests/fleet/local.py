"""Engines of this process as replicas: they die, hang, come back and leave when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from nanoactor import AsyncLLM
from nanoactor.fleet.client import FleetLLM
from nanoactor.fleet.hub import Hub
from tests.engine.conftest import DEMO
from tests.engine.harness import options, settled

SALT = bytes(range(32))


class Gone(Exception):
    """What the way to a replica raises once that is dead."""


class Replica:
    """An engine with its hub, and what has become of both."""

    def __init__(self, llm, fingerprint, interval):
        self.llm, self.hub = llm, Hub(llm, fingerprint, interval)
        self.died, self.runs = asyncio.Event(), asyncio.Event()
        self.runs.set()
        self.pushes = 0


class Local:
    """A `Connector`."""

    def __init__(self, interval=0.01):
        self.replicas = {}
        self.left = set()
        self._interval = interval
        self._watchers = []
        self._numbers = itertools.count()

    @property
    def members(self):
        return frozenset(self.replicas.keys() - self.left)

    def watch(self, changed):
        self._watchers.append(changed)

    def _changed(self):
        for changed in self._watchers:
            changed()

    async def open(self, replica, link):
        found = self._find(replica)
        async with contextlib.aclosing(found.hub.link(link)) as reports:
            while True:
                report = await self._unless_dead(found, anext(reports, None))
                await self._unless_dead(found, found.runs.wait())
                if report is None:
                    return
                yield report

    async def push(self, replica, orders):
        found = self._find(replica)
        await self._unless_dead(found, found.runs.wait())
        found.pushes += 1
        return found.hub.handle_orders(orders)

    def _find(self, replica):
        found = self.replicas.get(replica)
        if found is None or found.died.is_set():
            raise Gone(replica)
        return found

    async def _unless_dead(self, replica, awaitable):
        work, death = asyncio.ensure_future(awaitable), asyncio.ensure_future(replica.died.wait())
        try:
            await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Gone
            return work.result()
        finally:
            for task in (work, death):
                task.cancel()
            await asyncio.gather(work, death, return_exceptions=True)

    # -- what tests do ----------------------------------------------------------------------

    def add(self, llm, fingerprint="same"):
        """A new replica, made of an engine that runs."""
        name = f"replica-{next(self._numbers)}"
        self.replicas[name] = Replica(llm, fingerprint, self._interval)
        self.replicas[name].hub.start()
        self._changed()
        return name

    async def kill(self, name):
        """It is gone, and with it all that it had not told."""
        found = self.replicas.pop(name)
        found.died.set()
        self._changed()
        await found.hub.stop()
        return found.llm

    async def replace(self, name, fingerprint="same"):
        """It dies, and its engine serves as another one."""
        return self.add(await self.kill(name), fingerprint)

    def hang(self, name):
        """It goes on, but nobody hears of it, and it hears nobody."""
        self.replicas[name].runs.clear()

    def resume(self, name):
        self.replicas[name].runs.set()

    def leave(self, name):
        """It is to end: it serves what it has, and gets nothing new."""
        self.left.add(name)
        self._changed()


@contextlib.asynccontextmanager
async def engines(count, model=DEMO, **changes):
    """Engines that must be idle when they are left."""
    values = options(
        **{
            "skip_tokenizer_init": False,
            "prefix_salt": SALT,
            "num_kv_blocks": 400,
            "max_model_len": 1024,
            **changes,
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(AsyncLLM(str(model), **values)) for _ in range(count)
        ]
        yield found
        for llm in found:
            await settled(llm)


@contextlib.asynccontextmanager
async def fleet(count, *, silence=5.0, interval=0.01, model=DEMO, **changes):
    """(a fleet, the way to its replicas, their engines)."""
    async with engines(count, model, **changes) as found:
        local = Local(interval)
        for llm in found:
            local.add(llm)
        async with FleetLLM(found[0].config, local, silence=silence) as llm:
            while len(llm.fleet.replicas) < count:
                await asyncio.sleep(0.01)
            yield llm, local, found
        for name in list(local.replicas):
            await local.kill(name)
