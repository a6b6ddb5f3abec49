"""The page at `/`, in a real browser: a message is sent, its answer streams, is stopped, and the
tracks move."""

import asyncio
import base64
import dataclasses
import json
import os
import signal
from pathlib import Path

import axe_core_python
import pytest

from tests.server.chromium import BINARY, browsing
from tests.server.harness import here, url
from tests.server.scripted import Script, directory
from tests.server.test_images import drawn

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)

AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text() + "; 0"
ANSWER = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
SAID = f"{ANSWER}.querySelector('.said').textContent"


async def open_page(page, server):
    await page.call("Page.navigate", url=url(server))
    # Until its script has run, the name is that of the element.
    await page.until("document.getElementById('model') && typeof model === 'string' && model")


def test_a_message_streams_is_stopped_and_the_tracks_move(tmp_path, monkeypatch):
    async def main():
        options = dict(device="simulated:20")
        async with here(**options) as server, browsing(tmp_path) as page:
            # What the device samples may be the end, and answers would stop where they please.
            endless = dataclasses.replace(server.llm.files, eos_token_ids=())
            monkeypatch.setattr(server.llm._requests, "_files", endless)
            await open_page(page, server)
            assert "demo, 40960 tokens" in await page.evaluate("$('model').textContent")

            # By keyboard alone: the field has the focus, Enter sends, Escape stops.
            await page.type("Speak, friend.")
            await page.key("Enter", "\r")
            assert await page.evaluate("$('say').value") == ""
            first = len(await page.until(SAID))
            await page.until(f"{SAID}.length > {first + 40}")
            # On a busy machine all of that may have come at once, which has no pace.
            await page.until(f"{ANSWER}.querySelector('.figures').textContent.includes('tokens/s')")
            assert server._answers.num_live == 1
            await page.key("Escape")
            await page.until(f"{ANSWER}.dataset.state === 'stopped'")
            figures = await page.evaluate(f"{ANSWER}.querySelector('.figures').textContent")
            assert "TTFT" in figures
            assert "tokens/s" in figures
            assert figures.endswith("stopped")
            length = await page.evaluate(f"{SAID}.length")
            async with asyncio.timeout(30):  # the engine is told
                while server._answers.num_live:
                    await asyncio.sleep(0.02)
            assert await page.evaluate(f"{SAID}.length") == length

            # The same with buttons, to its end.
            await page.evaluate("$('max_completion_tokens').value = '30'")
            await page.evaluate("$('say').value = 'Again!'; $('send').click()")
            await page.until(f"{ANSWER}.dataset.state === 'done'")
            figures = await page.evaluate(f"{ANSWER}.querySelector('.figures').textContent")
            assert "+ 30 tokens" in figures
            assert await page.evaluate("history.length") == 4

            # Tracks.
            tracks = "Object.fromEntries([...tracks].map(([k, v]) => [k, +v.node.dataset.busy]))"
            await page.evaluate("$('max_completion_tokens').value = ''")
            await page.evaluate("$('say').value = 'On!'; $('send').click()")
            device = "now['runner.0 device']"
            most = f"{device} > 0 && {device} === Math.max(...Object.values(now))"
            busy = await page.until(f"(now => {most} && now)({tracks})")
            assert set(busy) == {
                *(
                    "frontend",
                    "tokenizer.0",
                    "scheduler",
                    "blocks",
                    "detokenizer",
                    "grammar",
                    "runner.0",
                ),
                "runner.0 device",
            }
            pixels = (
                "(() => { const c = tracks.get('runner.0 device').canvas; return [...c.getContext("
                "'2d').getImageData(0, 0, c.width, c.height).data].filter(v => v).length })()"
            )
            drawn = await page.evaluate(pixels)
            assert drawn > 0
            await page.until(f"{pixels} > {drawn}")
            await page.until("$('running').textContent === '1'")
            idle = await page.until("/^[0-9.]+ %$/.exec($('idle').textContent)?.[0]")
            assert 0 <= float(idle.split()[0]) < 100
            await page.evaluate("$('stop').click()")
            await page.until(f"{ANSWER}.dataset.state === 'stopped'")
            await page.until("$('idle').textContent === 'no work'")

            # Wrong parameters are told, and what was said stays.
            await page.evaluate("$('temperature').value = '-1'")
            await page.evaluate("$('say').value = 'Hm?'; $('send').click()")
            await page.until(f"{ANSWER}.dataset.state === 'failed'")
            figures = await page.evaluate(f"{ANSWER}.querySelector('.figures').textContent")
            assert "temperature must be" in figures
            for wrong in ("0,5", "9007199254740993"):
                await page.evaluate(f"$('temperature').value = ''; $('seed').value = '{wrong}'")
                await page.evaluate("$('say').value = 'Hm?'; $('send').click()")
                await page.until(f"{ANSWER}.dataset.state === 'failed'")
                text = await page.evaluate(f"{ANSWER}.querySelector('.figures').textContent")
                assert text.startswith("seed")

            # A conversation that is dropped while its answer streams stays dropped.
            await page.evaluate("$('fresh').click(); $('seed').value = '1'")
            await page.evaluate("$('say').value = 'Go!'; $('send').click()")
            await page.until(f"{SAID}.length > 20")
            await page.evaluate("$('fresh').click()")
            await page.until("!running")
            assert await page.evaluate("document.querySelectorAll('.turn').length") == 0
            assert await page.evaluate("Boolean($('empty')) && history.length === 0")

            await look_at(page)
            assert all(address.startswith((url(server), "data:")) for address in page.requests)
            told = [problem for problem in page.problems if "400 (Bad Request)" not in problem]
            assert told == []

    asyncio.run(main())


async def look_at(page):
    """On a phone nothing is cut off; light and dark differ; axe finds no fault in any of them."""
    await page.evaluate(AXE)
    colours = []
    for scheme in ("light", "dark"):
        await page.scheme(scheme)
        for width, height, mobile in ((1200, 800, False), (360, 740, True)):
            await page.resize(width, height, mobile)
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width
            for name in ("say", "send", "fresh", "tracks"):
                box = f"$('{name}').getBoundingClientRect()"
                assert await page.evaluate(f"{box}.width > 20 && {box}.right <= innerWidth")
            assert await faults(page) == []
        colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


async def faults(page):
    """What axe-core says hinders people: its rule, and where."""
    return await page.evaluate(
        "axe.run(document).then(found => found.violations.map("
        "v => v.id + ' ' + v.nodes.map(n => n.html.slice(0, 120)).join(' ')))"
    )


TEXT = """# Title

Some **bold** and *slanted* `code`, [here](https://example.com/a), [bad](javascript:alert),
[worse](data:text/html,x), <b>no tag</b> and https://example.org/x.

- one
  - inner
- two

1. first
2. second

| a | b |
| :-: | --: |
| 1 | `x|y` |

- [x] bought
- [ ] ~~eaten~~ kept

> quoted

```python
print("<img src=x onerror=alert(1)>")
```
"""


def test_markdown_becomes_nodes_and_nothing_becomes_html(tmp_path):
    async def main():
        async with here() as server, browsing(tmp_path) as page:
            await open_page(page, server)
            await page.evaluate(
                "window.box = make('div', 'said'); box.append(...markdown("
                + json.dumps(TEXT)
                + ")); $('talk').append(box)"
            )
            texts = (
                "s => [...box.querySelectorAll(s)].map(n => [...n.childNodes].filter(c => "
                "!['UL', 'OL'].includes(c.nodeName)).map(c => c.textContent).join('').trim())"
            )

            async def of(selector):
                return await page.evaluate(f"({texts})({json.dumps(selector)})")

            assert await of("h3") == ["Title"]
            assert await of("strong") == ["bold"]
            assert await of("em") == ["slanted"]
            assert await of("ul > li") == ["one", "inner", "two", "bought", "eaten kept"]
            assert await of("s") == ["eaten"]
            boxes = "[...box.querySelectorAll('input')].map(b => [b.type, b.checked, b.disabled])"
            assert await page.evaluate(boxes) == [["checkbox", c, True] for c in (True, False)]
            aligned = "[...box.querySelectorAll('td')].map(c => getComputedStyle(c).textAlign)"
            assert (await page.evaluate(aligned))[:2] == ["center", "right"]
            assert await of("li li") == ["inner"]
            assert await of("ol > li") == ["first", "second"]
            assert await of("th") == ["a", "b"]
            assert await of("blockquote") == ["quoted"]
            assert await of("pre") == ['print("<img src=x onerror=alert(1)>")']
            assert await of("b, img, script") == []
            assert "<b>no tag</b>" in await page.evaluate("box.textContent")
            links = "[...box.querySelectorAll('a')].map(a => [a.href, a.rel, a.target])"
            assert await page.evaluate(links) == [
                ["https://example.com/a", "noopener noreferrer", "_blank"],
                ["https://example.org/x", "noopener noreferrer", "_blank"],
            ]
            assert "here (example.com)" in await page.evaluate("box.textContent")
            # A link that names a host other than its own shows that.
            shown = "s => { const d = make('div'); d.append(...markdown(s)); return d.textContent }"
            for words, address, host in (
                ("bank.com", "http://a/", "a"),
                ("bank.com/evil.com", "https://evil.com/x", "evil.com"),
            ):
                text = await page.evaluate(f"({shown})({json.dumps(f'[{words}]({address})')})")
                assert text == f"{words} ({host})"
            same = "[https://a.org/x](https://a.org/y)"
            assert await page.evaluate(f"({shown})({json.dumps(same)})") == "https://a.org/x"
            # A fence ends where another of its kind stands alone.
            nested = "````md\n```python\nx\n```\n````\nend"
            codes = "s => { const d = make('div'); d.append(...markdown(s)); "
            codes += "return [...d.querySelectorAll('pre')].map(n => n.textContent) }"
            assert await page.evaluate(f"({codes})({json.dumps(nested)})") == ["```python\nx\n```"]
            assert await page.evaluate(f"({codes})({json.dumps('``` ```x``` is code')})") == []
            # What streams is cut anywhere, and what models write is not always well formed.
            cut = "for (let n = 0; n <= text.length; n += 1) markdown(text.slice(0, n))"
            await page.evaluate(f"(text => {{ {cut} }})({json.dumps(TEXT)})")
            for odd in ("|", "||\n--", "- ", "```", "# ", ">", "**", "[](", "1.", "\\|"):
                await page.evaluate(f"markdown({json.dumps(odd)})")
            assert page.problems == []

    asyncio.run(main())


def test_a_conversation_is_greeted_kept_copied_and_answered_again(tmp_path):
    async def main():
        async with here(device="simulated:5") as server, browsing(tmp_path) as page:
            await open_page(page, server)
            greeting = await page.evaluate("$('empty').textContent")
            assert "demo" in greeting
            assert f"{url(server)}/v1" in greeting
            await page.evaluate("document.querySelector('.tries button').click()")
            assert await page.evaluate("$('say').value.length > 5")
            await page.evaluate("$('max_completion_tokens').value = '12'")
            await page.key("Enter", "\r")
            await page.until(f"{ANSWER}?.dataset.state === 'done'")
            said = await page.evaluate(SAID)
            bar = f"{ANSWER}.querySelector('.timeline').getAttribute('aria-label')"
            parts = ["accepted", "queue", "prefill", "decode"]
            said_parts = [part.split()[0] for part in (await page.evaluate(bar)).split(", ")]
            assert said_parts == parts

            # Another answer to the same question takes the place of the first.
            await page.evaluate(f"{ANSWER}.querySelector('.again').click()")
            await page.until("!running")
            again = await page.evaluate(SAID)
            assert again != said
            assert await page.evaluate("document.querySelectorAll('.turn').length") == 2
            assert await page.evaluate("history.length") == 2
            copy = "[...node.querySelectorAll('button')].find(b => b.textContent === 'Copy')"
            await page.evaluate(f"(node => {copy}.click())({ANSWER})")
            await page.until(f"{ANSWER}.textContent.includes('Copied')")

            # A reload keeps it, and the conversation goes on where it stood.
            await open_page(page, server)
            await page.until("document.querySelectorAll('.turn').length === 2")
            assert await page.evaluate(SAID) == again
            await page.evaluate("$('say').value = 'And then?'; $('send').click()")
            await page.until("history.length === 4")
            await page.evaluate("$('fresh').click()")
            await open_page(page, server)
            assert await page.evaluate("Boolean($('empty')) && history.length === 0")

            # Parameters lie above the conversation and do not squeeze it.
            before = await page.evaluate("$('talk').clientHeight")
            await page.evaluate("$('options').open = true")
            assert await page.evaluate("$('talk').clientHeight") == before
            await page.evaluate(AXE)
            assert await faults(page) == []
            await page.evaluate("document.documentElement.removeAttribute('lang')")
            assert len(await faults(page)) == 1, "it would find one"
            await page.key("Escape")
            assert await page.evaluate("$('options').open") is False
            assert page.problems == []

    asyncio.run(main())


async def ask(page, text):
    await page.evaluate(f"$('say').value = {json.dumps(text)}; $('send').click()")
    await page.until(f"!running && {ANSWER}?.dataset.state")


TALKS = "[...document.querySelectorAll('.talk .open')].map(one => one.textContent)"


def test_conversations_are_listed_renamed_and_deleted_and_no_tab_overwrites_another(tmp_path):
    async def main():
        async with here(device="simulated:1") as server, browsing(tmp_path) as page:
            await open_page(page, server)
            await page.evaluate("$('max_completion_tokens').value = '3'")
            await ask(page, "One.")
            await page.evaluate("$('fresh').click()")
            await ask(page, "Two.")
            assert await page.evaluate(TALKS) == ["Two.", "One."]

            # By keyboard: open the first, rename it.
            await page.evaluate("$('talks').open = true; $('list').lastChild.firstChild.focus()")
            await page.key("Enter", "\r")
            asked = "document.querySelector('.turn.user .said').textContent"
            assert await page.until(f"{asked} === 'One.' && {asked}") == "One."
            await page.evaluate("$('talks').open = true; $('list').lastChild.children[1].click()")
            await page.evaluate("document.activeElement.value = ''")
            await page.type("First")
            await page.key("Enter", "\r")
            assert await page.until(f"{TALKS}.includes('First') && {TALKS}") == ["Two.", "First"]

            # Another tab goes on with this conversation: both stay.
            other = "(o => keep(STEM + ident, {...o, version: o.version + 1, title: 'Other'}))"
            await page.evaluate(f"{other}(kept(STEM + ident))")
            await ask(page, "More.")
            assert sorted(await page.evaluate(TALKS)) == [
                *("First (continued here)", "Other", "Two.")
            ]
            assert await page.evaluate("kept(STEM + ident).told.length") == 4

            await page.evaluate("$('talks').open = true")
            await page.evaluate(AXE)
            assert await faults(page) == []
            for left in (2, 1, 0):
                await page.evaluate("$('list').firstChild.children[2].click()")
                assert len(await page.evaluate(TALKS)) == left
            assert await page.evaluate("Boolean($('empty')) && history.length === 0")
            assert page.problems == []

    asyncio.run(main())


def test_what_an_answer_has_said_is_kept_when_another_conversation_is_opened(tmp_path, monkeypatch):
    async def main():
        async with here(device="simulated:20") as server, browsing(tmp_path) as page:
            endless = dataclasses.replace(server.llm.files, eos_token_ids=())
            monkeypatch.setattr(server.llm._requests, "_files", endless)
            await open_page(page, server)
            await page.evaluate("$('say').value = 'Speak.'; $('send').click()")
            await page.until(f"{SAID}.length > 20")
            first = await page.evaluate("$('fresh').click(); told.length")
            assert first == 0
            await page.until("!running && $('stop').hidden")
            assert await page.evaluate(TALKS) == ["Speak."]
            await page.evaluate("$('list').firstChild.firstChild.click()")
            assert len(await page.evaluate(SAID)) > 20
            assert await page.evaluate(f"{ANSWER}.dataset.state") == "stopped"
            assert await page.evaluate("history.length") == 2

            # One that is deleted while it is answered stays deleted.
            await page.evaluate("$('say').value = 'On.'; $('send').click()")
            await page.until(f"{SAID}.length > 20")
            await page.evaluate("$('list').firstChild.children[2].click()")
            await page.until("!running")
            assert await page.evaluate(TALKS) == []
            assert page.problems == []

    asyncio.run(main())


def test_without_room_a_conversation_stays_one_and_the_page_says_so(tmp_path):
    async def main():
        async with here(device="simulated:1") as server, browsing(tmp_path) as page:
            await open_page(page, server)
            await page.evaluate("$('max_completion_tokens').value = '3'")
            await ask(page, "One.")
            # Renamed by another tab, it keeps that name.
            await page.evaluate("keep(STEM + ident, {...kept(STEM + ident), title: 'Named'})")
            await ask(page, "Two.")
            assert await page.evaluate(TALKS) == ["Named"]
            whole = "Storage.prototype.setItem"
            await page.evaluate(f"window.old = {whole}; {whole} = () => {{ throw new Error() }}; 0")
            before = await page.evaluate("ident + version")
            for text in ("Three.", "Four."):
                await ask(page, text)
            assert await page.evaluate("ident + version") == before
            assert await page.evaluate("document.querySelectorAll('.note').length") == 1
            await page.evaluate(f"{whole} = window.old; 0")
            await ask(page, "Five.")
            assert await page.evaluate(TALKS) == ["Named"]
            assert await page.evaluate("kept(STEM + ident).told.length") == 10

    asyncio.run(main())


def test_figures_are_the_servers_own_and_the_context_in_use_is_shown(tmp_path):
    async def main():
        options = dict(device="simulated:1", max_model_len=256)
        async with here(**options) as server, browsing(tmp_path) as page:
            await open_page(page, server)
            usage = "{completion_tokens: 11, completion_time: 0.02}"
            assert await page.evaluate(f"rate({usage}, 1, 0)") == 500
            for nothing in ("{completion_tokens: 9, completion_time: 0}, 1, 0", "null, 9, 0"):
                assert await page.evaluate(f"rate({nothing})") == 0
            assert await page.evaluate("rate(null, 11, 1000)") == 10
            await page.evaluate("$('max_completion_tokens').value = '5'")
            assert await page.evaluate("$('full').hidden")
            await ask(page, "Speak.")
            assert 0 < await page.evaluate("$('meter').value") < 0.2
            assert "% of context" in await page.evaluate("$('used').textContent")

            # Where a conversation has become too long, its oldest messages can be left out.
            await ask(page, "a b c d e f " * 20)
            await ask(page, "g h i j k l " * 22)
            assert await page.evaluate(f"{ANSWER}.dataset.state") == "failed"
            shorter = "[...document.querySelectorAll('.again')].at(-1)"
            assert "oldest" in await page.evaluate(f"{shorter}.textContent")
            await page.evaluate(f"{shorter}.click()")
            await page.until(f"!running && {ANSWER}?.dataset.state === 'done'")
            assert await page.evaluate("history.length < 6 && told.length === 6")
            assert [p for p in page.problems if "400 (Bad Request)" not in p] == []

    asyncio.run(main())


def test_thinking_can_be_switched_where_the_template_has_a_switch(tmp_path, monkeypatch):
    async def main():
        script = Script(monkeypatch)
        script.say("Hello.")
        (tmp_path / "model").mkdir()
        model = directory(tmp_path / "model")
        options = dict(placement="single", device="simulated:1")
        async with here(model, **options) as server, browsing(tmp_path / "browser") as page:
            await open_page(page, server)
            assert await page.evaluate("$('thinks').hidden") is False
            sizes = []
            for value in ("true", "false"):
                await page.evaluate(f"$('fresh').click(); $('thinking').value = '{value}'")
                await ask(page, "Hello?")
                sizes.append(await page.evaluate("told.at(-1).context"))
            assert sizes[0] < sizes[1], "the template writes empty thoughts"

    os.makedirs(tmp_path / "browser")
    asyncio.run(main())


@pytest.mark.deadly
def test_a_lane_goes_dark_and_comes_back(tmp_path):
    async def main():
        options = dict(placement="default", device="simulated:20")
        async with here(**options) as server, browsing(tmp_path) as page:
            await open_page(page, server)
            lane = """document.querySelector('[data-track="detokenizer"]')"""
            await page.until(f"{lane} && {lane}.dataset.dark === '0'")
            os.kill(server.llm.pids["detokenizer"], signal.SIGKILL)
            await page.until(f"{lane}.dataset.dark > 0")
            others = (
                """[...document.querySelectorAll('.track')].filter(one => one.dataset.dark > 0)"""
            )
            assert await page.evaluate(f"{others}.length") == 1
            await page.evaluate("$('say').value = 'Speak.'; $('send').click()")
            await page.until(f"{SAID}.length > 20")
            await page.until("$('state').textContent === ''")

    asyncio.run(main())


def test_thoughts_and_a_servers_death_on_the_page(tmp_path, monkeypatch):
    async def main():
        script = Script(monkeypatch)
        script.say("<think>\nHm.\n</think>\n\nHello.", by_character=True)
        (tmp_path / "model").mkdir()
        model = directory(tmp_path / "model")
        options = dict(placement="single", device="simulated:1")
        async with here(model, **options) as server, browsing(tmp_path / "browser") as page:
            await open_page(page, server)
            await page.evaluate("$('say').value = 'Hello?'; $('send').click()")
            await page.until(f"{ANSWER}.dataset.state === 'done'")
            assert await page.evaluate(SAID) == "Hello."
            thoughts = f"{ANSWER}.querySelector('details div').textContent"
            assert await page.evaluate(thoughts) == "Hm."
            await server.stop()
            await page.until("$('state').textContent.startsWith('not reachable')")

    os.makedirs(tmp_path / "browser")
    asyncio.run(main())


def test_an_image_is_attached_shown_and_read(tmp_path):
    """A model that sees offers it; the file goes along as a data: URL, and the answer streams."""
    image = tmp_path / "digits.png"
    image.write_bytes(drawn("472"))

    async def main():
        options = dict(device="cpu", dtype="float32", num_kv_blocks=200, max_num_seqs=4)
        async with here("demo-vl", **options) as server, browsing(tmp_path) as page:
            await open_page(page, server)
            await page.until("!$('attach').hidden")
            encoded = base64.b64encode(image.read_bytes()).decode()
            await page.evaluate(
                "(async () => { const bytes = Uint8Array.from(atob('" + encoded + "'), "
                "c => c.charCodeAt(0)); attach([new File([bytes], 'x.png', {type: 'image/png'})]) "
                "})()"
            )
            await page.until("images.length === 1")
            # Pasted or dropped it is taken too; what is no image is not.
            await page.evaluate(
                "(() => { const moved = new DataTransfer(); const bytes = Uint8Array.from(atob('"
                + encoded
                + "'), c => c.charCodeAt(0)); moved.items.add(new File([bytes], 'x.png', {type: "
                "'image/png'})); moved.items.add(new File(['a'], 'a.txt', {type: 'text/plain'}));"
                "const init = {bubbles: true, cancelable: true}; document.body.dispatchEvent(new "
                "ClipboardEvent('paste', {...init, clipboardData: moved})); document.body."
                "dispatchEvent(new DragEvent('drop', {...init, dataTransfer: moved})) })()"
            )
            await page.until("images.length === 3")
            await page.evaluate(
                "images.splice(1); $('images').lastChild.remove();$('images').lastChild.remove()"
            )
            assert await page.evaluate("document.querySelectorAll('#images img').length") == 1
            await page.evaluate("$('temperature').value = '0'")
            await page.evaluate("$('say').value = 'read:'; $('send').click()")
            await page.until(f"{ANSWER}.dataset.state === 'done'")
            assert await page.evaluate("document.querySelectorAll('.turn.user img').length") == 1
            assert await page.evaluate("images.length") == 0
            return await page.evaluate(SAID)

    assert asyncio.run(main()) == "472"


def test_a_model_that_is_blind_offers_no_images(tmp_path):
    async def main():
        async with here() as server, browsing(tmp_path) as page:
            await open_page(page, server)
            return await page.evaluate("$('attach').hidden")

    assert asyncio.run(main())
