"""A real browser without a window, driven by the DevTools protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import signal
import time

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--remote-debugging-port=0"),
)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}
        self.problems: list[str] = []
        """What the page has complained about, and requests to anybody else."""
        self.requests: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self):
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" in value:
                self._answers.pop(value["id"]).set_result(value)
            elif value["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(value["params"]["exceptionDetails"]))
            elif value["method"] == "Log.entryAdded":
                if value["params"]["entry"]["level"] == "error":
                    self.problems.append(str(value["params"]["entry"]))
            elif value["method"] == "Network.requestWillBeSent":
                self.requests.append(value["params"]["request"]["url"])

    async def call(self, method, **params):
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        value = await asyncio.wait_for(answer, 60)
        assert "error" not in value, value
        return value["result"]

    async def evaluate(self, expression):
        """The value of a JavaScript expression."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression, seconds=60.0):
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {value!r}; {self.problems}"
            await asyncio.sleep(0.02)
        return value

    async def key(self, key, text=""):
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    async def type(self, text):
        await self.call("Input.insertText", text=text)

    async def resize(self, width, height, mobile=False):
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    async def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self):
        found = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])

    async def close(self):
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def browsing(directory):
    """A page in a fresh browser, whose profile lies in `directory`."""
    command = [BINARY, *_OPTIONS, f"--user-data-dir={directory}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(directory, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = await answer.json()
            address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(page.call("Browser.close"), 2)
                finally:
                    await page.close()
    finally:
        await _end(process)


async def _port(directory, process):
    """Chromium writes it down once it listens."""
    for _ in range(500):
        path = directory / "DevToolsActivePort"
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        assert process.returncode is None, "chromium has ended"
        await asyncio.sleep(0.05)
    raise AssertionError("chromium does not listen")


async def _end(process):
    """With all its children: they are a group of their own."""
    import os

    try:
        await asyncio.wait_for(process.wait(), 3)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
