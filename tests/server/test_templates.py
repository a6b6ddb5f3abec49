"""A chat template that hangs holds up nobody else, wherever it is rendered."""

import asyncio
import time

import httpx2 as httpx

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import InvalidRequest
from tests.engine.harness import collect
from tests.server.harness import here, url
from tests.server.scripted import directory
from tests.text.test_renderer import HANG, LOOP

SLOW = 60.0
"""Seconds that a template may take where it must not matter how long that is."""
FEW = SamplingParams.for_model(max_tokens=3)


def chat(content):
    return [{"role": "user", "content": content}]


def test_other_requests_go_on_and_the_hanging_one_can_be_aborted(tmp_path):
    async def main():
        options = dict(device="simulated:1", max_num_seqs=8, template_timeout=SLOW)
        async with AsyncLLM(str(directory(tmp_path, HANG)), **options) as llm:
            begin = time.monotonic()
            hanging = asyncio.ensure_future(collect(llm, chat("hang"), FEW, request_id="slow"))
            behind = asyncio.ensure_future(collect(llm, chat("fine"), FEW))
            await asyncio.sleep(0.3)
            assert (await collect(llm, "a text", FEW)).finished
            await llm.abort("slow")
            assert (await hanging).outputs[0].finish_reason == "abort"
            assert (await behind).finished
            assert time.monotonic() - begin < SLOW, "the template's limit had to help"

    asyncio.run(main())


def test_a_conversation_that_hangs_is_a_typed_error(tmp_path):
    async def main():
        options = dict(device="simulated:1", max_num_seqs=8, template_timeout=0.3)
        async with AsyncLLM(str(directory(tmp_path, HANG)), **options) as llm:
            outputs = await asyncio.gather(
                *(collect(llm, chat(text), FEW) for text in ("hang", "a", "hang", "b")),
                return_exceptions=True,
            )
            for output in outputs[::2]:
                assert isinstance(output, InvalidRequest)
                assert "the chat template was stopped because it took longer than 0.3 s" in str(
                    output
                )
            assert all(output.finished for output in outputs[1::2])

    asyncio.run(main())


OPENS = (
    "{% if flavour is defined and flavour == 'hang' %}" + LOOP + "{% endif %}"
    "{{ messages[-1].content }}<think>"
)


def test_the_servers_own_looks_at_a_template_hold_up_nobody(tmp_path):
    """`/tokenize`, and how an answer begins where a request has options of its own."""

    async def main():
        config = {"served_model_name": "demo"}
        options = dict(device="simulated:1", template_timeout=0.3)
        model = directory(tmp_path, OPENS)
        async with (
            here(model, config=config, **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):

            def ask(path, flavour, **values):
                options = {"chat_template_kwargs": {"flavour": flavour}, "messages": chat("a")}
                return client.post(path, json={"model": "demo", **options, **values})

            answers = await asyncio.gather(
                ask("/tokenize", "hang"),
                ask("/v1/chat/completions", "hang", max_tokens=3),
                ask("/v1/chat/completions", "sweet", max_tokens=3),
                ask("/tokenize", "sweet"),
                client.post("/tokenize", json={"prompt": "a"}),
                client.get("/health"),
            )
            assert [answer.status_code for answer in answers] == [400, 400, 200, 200, 200, 200]
            for answer in answers[:2]:
                assert "chat template was stopped" in answer.json()["error"]["message"]
            message = answers[2].json()["choices"][0]["message"]
            assert message["reasoning_content"], "the prompt opens a thought"

    asyncio.run(main())


def test_a_template_that_always_hangs_leaves_an_engine_that_serves_text(tmp_path, caplog):
    async def main():
        config = {"served_model_name": "demo"}
        options = dict(device="simulated:1", template_timeout=0.3)
        model = directory(tmp_path, LOOP)
        async with (
            here(model, config=config, **options) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            text = {"model": "demo", "prompt": "a", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=text)).status_code == 200
            messages = {"model": "demo", "messages": chat("a")}
            answer = await client.post("/v1/chat/completions", json=messages)
            assert answer.status_code == 400
            assert "chat template was stopped" in answer.json()["error"]["message"]

    asyncio.run(main())
    assert "conversations that need a chat template will be refused" in caplog.text
