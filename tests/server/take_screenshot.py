"""The picture of the page: `python -m tests.server.take_screenshot docs/images/page.png`."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from nanoactor import AsyncLLM
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from tests.server.chromium import browsing
from tests.server.harness import posted, raw, url


async def other(server: Server) -> None:
    """Somebody else's request, so that there is something to see."""
    body = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 250, "ignore_eos": True}
    await raw(server.port, posted("/v1/completions", json.dumps(body).encode()), 60)


async def main(path: str) -> None:
    """A chat with the demo model on the CPU, in the middle of an answer among others."""
    server = Server(AsyncLLM("demo", device="cpu"), ServerConfig(port=0, access_log=False))
    await server.start()
    try:
        with tempfile.TemporaryDirectory() as profile:
            async with browsing(Path(profile)) as page:
                await page.resize(1280, 800)
                await page.call("Page.navigate", url=url(server))
                await page.until("document.getElementById('model') && model !== ''")
                await page.evaluate("$('seed').value = 3; $('max_completion_tokens').value = 250")
                for text in ("Speak, friend: who goes there?", "And what of the queen?"):
                    await page.evaluate(f"$('say').value = {text!r}; $('send').click()")
                    await page.until("!running", 60)
                    await asyncio.sleep(1)
                others = [asyncio.ensure_future(other(server)) for _ in range(12)]
                await asyncio.sleep(2)
                await page.evaluate("$('say').value = 'Go on.'; $('send').click()")
                await asyncio.sleep(2.5)
                Path(path).write_bytes(await page.screenshot())
                await asyncio.gather(*others)
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
