"""Images of the page in each state: `python -m tests.server.take_screenshot docs/images`."""

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


MARKDOWN = """Here is a **short** answer with `code`:

| actor | owns |
| --- | --- |
| scheduler | credits, steps |
| block manager | block tables |

```python
async for output in llm.generate("ROMEO:"):
    print(output.outputs[0].text)
```

See [the docs](https://example.org/docs)."""


async def main(directory: Path) -> None:
    """The demo model on the CPU: greeting, conversation among others' requests, Markdown, phone."""

    async def take(name: str) -> None:
        (directory / name).write_bytes(await page.screenshot())

    server = Server(AsyncLLM("demo", device="cpu"), ServerConfig(port=0, access_log=False))
    await server.start()
    try:
        with tempfile.TemporaryDirectory() as profile:
            async with browsing(Path(profile)) as page:
                await page.resize(1280, 800)
                await page.call("Page.navigate", url=url(server))
                await page.until("document.getElementById('model') && model !== ''")
                await page.until("Boolean($('empty'))")
                await take("page_empty.png")
                await page.evaluate("$('seed').value = 3; $('max_completion_tokens').value = 250")
                for text in ("Speak, friend: who goes there?", "And what of the queen?"):
                    await page.evaluate(f"$('say').value = {text!r}; $('send').click()")
                    await page.until("!running", 60)
                    await asyncio.sleep(1)
                others = [asyncio.ensure_future(other(server)) for _ in range(12)]
                await asyncio.sleep(2)
                await page.evaluate("$('say').value = 'Go on.'; $('send').click()")
                await asyncio.sleep(2.5)
                await take("page.png")
                await page.evaluate("$('options').open = true")
                await take("page_parameters.png")
                await page.evaluate("$('options').open = false")
                await asyncio.gather(*others)
                await page.until("!running", 60)
                answer = {"role": "assistant", "text": MARKDOWN, "state": "done"}
                answer |= {"figures": "", "times": {"accept": 2, "prefill": 9, "decode": 80}}
                question = {"role": "user", "text": "Who owns what?"}
                await page.evaluate(f"show({json.dumps(question)}); show({json.dumps(answer)})")
                await page.scheme("dark")
                await asyncio.sleep(0.7)
                await take("page_dark.png")
                await page.scheme("light")
                await page.resize(390, 844, mobile=True)
                await page.evaluate("scroll(true); window.scrollTo(0, 0)")
                await asyncio.sleep(0.7)
                await take("page_phone.png")
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
