"""Servers for tests: as a process of their own, or in the test's loop; and what talks to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx2 as httpx

from nanoactor import AsyncLLM
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from tests.conftest import survivors
from tests.engine.harness import settled

SHORT = ("--max-model-len", "1024")
CPU = ("--device", "cpu", "--threads", "1", "--dtype", "float32", "--num-kv-blocks", "512", *SHORT)
SIMULATED = ("--device", "simulated:2", *SHORT)
# Where the server is what is tested: the engine's actors share its process.
IN_ONE = (*SIMULATED, "--placement", "single")


class Served:
    """A server in a process of its own."""

    def __init__(self, *arguments, model="demo", limits=(), process_group=None, **environment):
        command = [sys.executable, "-m", "nanoactor", "serve", model, "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*limits, *command],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
            process_group=process_group,
        )
        self.lines = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listening.wait(240)  # a busy machine may have kernels to compile; who dies is noticed
        if not self.url:  # or it would stay, and slow down all that follows
            self.process.kill()
            self.process.wait()
        assert self.url, self.lines
        self.port = int(self.url.rpartition(":")[2])
        self.family = {int(pid) for pid in _descendants(self.process.pid)}

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def stop(self, number=signal.SIGTERM, timeout=240):
        """Send a signal and return the exit status; nothing of it may be left."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self._reader.join(30)
        self.process.stderr.close()
        assert not survivors(self.family)
        return code

    def get(self, path, **options):
        with httpx.Client(timeout=60) as client:
            return client.get(self.url + path, **options)

    def post(self, path, value, **options):
        with httpx.Client(timeout=60) as client:
            return client.post(self.url + path, json=value, **options)

    def resident(self):
        """Bytes of memory of the server's own process, file mappings left out."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return 1024 * int(re.search(r"RssAnon:\s+(\d+)", file.read())[1])


def _descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        mine = file.read().split()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            mine += file.read().split()
    return set(mine) | {child for one in set(mine) for child in _descendants(int(one))}


@contextlib.contextmanager
def served(*arguments, **options):
    """A server that must end well."""
    server = Served(*arguments, **options)
    try:
        yield server
    except BaseException:
        server.process.kill()
        server.stop()
        raise
    assert server.stop() == 0, server.lines
    assert not [line for line in server.lines if "Traceback" in line], server.lines


@contextlib.asynccontextmanager
async def here(model="demo", config=None, **options):
    """A server in this process and loop, and its engine too; idle when left."""
    values = dict(placement="single", device="simulated:2", max_num_seqs=64, stop_timeout=5.0)
    llm = AsyncLLM(str(model), **{**values, **options})
    server = Server(llm, ServerConfig(port=0, access_log=False, **(config or {})))
    await server.start()
    try:
        yield server
        if llm._system.dead is None and not llm._closed:
            await settled(llm)
    finally:
        await server.stop()


def url(server):
    return f"http://127.0.0.1:{server.port}"


async def raw(port, data, seconds=30.0, halves=()):
    """All that a server answers to these bytes, until it hangs up or the time is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        for wait, more in halves:
            await asyncio.sleep(wait)
            writer.write(more)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                while part := await reader.read(1 << 16):
                    answer += part
        return answer
    finally:
        await hang_up(writer)


async def hang_up(writer):
    """Close a connection, and wait until it is."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def posted(path, body, *headers, length=None, kind="application/json"):
    """A request as bytes."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events(text):
    """The values of a stream of events; the last is "[DONE]" where it is complete."""
    parts = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts), text
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]
