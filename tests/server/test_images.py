"""Images over HTTP: the official client sends one as a data: URL and gets what it shows."""

import asyncio
import base64
import io
import time

import openai
import pytest
from aiohttp import web
from PIL import Image, ImageDraw, ImageFont

from tests.server.harness import CPU, events, here, served, url

SMALL = (*CPU, "--max-num-seqs", "8")


def drawn(text):
    """An image of digits, as PNG."""
    image = Image.new("RGB", (32 * len(text), 64), (20, 30, 90))
    font = ImageFont.load_default(30)
    ImageDraw.Draw(image).text((6, 12), text, font=font, fill=(250, 220, 90))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_url(image):
    return "data:image/png;base64," + base64.b64encode(image).decode()


def chat(*images, text="read: ", detail=None):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    for part in parts if detail else ():
        part["image_url"]["detail"] = detail
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def server():
    with served(*SMALL, model="demo-vl") as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_tells_what_an_image_shows(client):
    found = client.chat.completions.create(
        model="demo-vl", messages=chat(data_url(drawn("472"))), temperature=0, max_tokens=8
    )
    assert found.choices[0].message.content == "472"
    assert found.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_the_same_and_the_second_turn_goes_on(client):
    messages = chat(data_url(drawn("31")))
    stream = client.chat.completions.create(
        model="demo-vl", messages=messages, temperature=0, max_tokens=8, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "31"
    messages += [{"role": "assistant", "content": text}, *chat(data_url(drawn("8")))]
    found = client.chat.completions.create(
        model="demo-vl", messages=messages, temperature=0, max_tokens=8
    )
    assert found.usage.prompt_tokens > 2 * 4


def test_two_images_are_told_apart_and_low_detail_is_accepted(client):
    images = [data_url(drawn(text)) for text in ("12", "34")]
    for question, answer in (("first: ", "12"), ("second: ", "34")):
        found = client.chat.completions.create(
            model="demo-vl",
            messages=chat(*images, text=question, detail="low"),
            temperature=0,
            max_tokens=8,
        )
        assert found.choices[0].message.content == answer


def test_metrics_count_images(server, client):
    def figures():
        lines = server.get("/metrics").text.splitlines()
        pairs = (line.split() for line in lines if line.startswith("nanoactor_"))
        return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}

    # The monitor looks now and then: what other tests have sent may not be counted yet.
    before, latest = None, figures()
    while before is None or before["nanoactor_images_total"] != latest["nanoactor_images_total"]:
        time.sleep(2)
        before, latest = latest, figures()
    before = latest
    for text in ("read: ", "first: "):  # one image, two prompts
        client.chat.completions.create(
            model="demo-vl", messages=chat(data_url(drawn("90")), text=text), max_tokens=2
        )
    deadline = time.monotonic() + 30  # the monitor looks now and then
    grown = {}
    while grown.get("nanoactor_images_total") != 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        grown = {name: value - before.get(name, 0) for name, value in figures().items()}
    assert grown["nanoactor_images_total"] == 2
    assert grown["nanoactor_images_decoded_total"] == 1
    assert grown["nanoactor_images_encoded_total"] == 1
    assert grown["nanoactor_encoder_cache_hits_total"] <= 1
    assert grown["nanoactor_image_decode_seconds_total"] > 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://example.org/x.png"}},
            "does not fetch",
        ),
        (
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
            "does not fetch",
        ),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,QQ=="}}, "image"),
        ({"type": "image_url", "image_url": {"url": data_url(b"nonsense")}}, "supported formats"),
        ({"type": "image_url", "image_url": {"url": data_url(drawn("1")[:200])}}, "decoded"),
        ({"type": "image_url"}, "requires the field image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "finest"}}, "detail"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "videos"),
    ],
)
def test_what_is_no_image_gets_400_and_the_server_goes_on(server, client, part, message):
    body = {"model": "demo-vl", "messages": [{"role": "user", "content": [part]}]}
    found = server.post("/v1/chat/completions", body)
    assert found.status_code == 400, found.text
    assert message in found.json()["error"]["message"]
    assert client.models.list().data[0].id == "demo-vl"


def test_a_model_that_is_blind_takes_no_images(demo_server):
    body = {"model": "demo", "messages": chat(data_url(drawn("1")))}
    found = demo_server.post("/v1/chat/completions", body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages[0].content[0].type"
    assert "does not accept images" in found.json()["error"]["message"]


def test_an_image_of_an_allowed_host_is_fetched():
    """The address is that of this machine, so the test lets it pass, and nothing else does."""
    import aiohttp

    async def main():
        async def image(request):
            return web.Response(body=drawn("605"), content_type="image/png")

        app = web.Application()
        app.router.add_get("/x.png", image)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        config = dict(allowed_media_domains=(f"images.test:{port}",))
        options = dict(device="cpu", dtype="float32", num_kv_blocks=200, max_num_seqs=4)
        async with here("demo-vl", config, **options) as server:

            async def look_up(host, port):
                assert host == "images.test"
                return ["127.0.0.1"]

            server._media._resolver._look_up = look_up
            server._media._resolver._is_public = "127.0.0.1".__eq__
            body = {
                "model": "demo-vl",
                "messages": chat(f"http://images.test:{port}/x.png"),
                "temperature": 0,
                "max_tokens": 8,
                "stream": True,
            }
            async with aiohttp.ClientSession() as session:
                answer = await session.post(f"{url(server)}/v1/chat/completions", json=body)
                told = events(await answer.text())
        await runner.cleanup()
        return "".join(
            one["choices"][0]["delta"].get("content") or "" for one in told[:-1] if one["choices"]
        )

    assert asyncio.run(main()) == "605"
