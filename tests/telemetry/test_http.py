"""Spans of requests that come over HTTP: the caller's trace, whichever door it takes."""

import asyncio

import httpx2 as httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from tests.engine.harness import on_a_loop, settled
from tests.server.harness import hang_up, here, posted, url
from tests.telemetry.harness import FAST, PARENT, STAGES, TRACE, only, requests, traceparent

HEADERS = {"traceparent": traceparent(), "tracestate": "vendor=1", "x-request-id": "mine"}
CHAT = {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 4}
DOORS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Speak.", "max_tokens": 4},
    "/v1/responses": {"input": "Speak.", "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/invocations": CHAT,
}
POOLING = {
    "/v1/embeddings": {"input": ["one", "two"]},
    "/rerank": {"query": "one", "documents": ["two"]},
    "/score": {"text_1": "one", "text_2": "two"},
}


async def posts(path, body, headers=HEADERS, config=None, **options):
    """The answer of a server that is closed afterwards, so that its spans are complete."""
    async with (
        here(config=config, **{**FAST, **options}) as server,
        httpx.AsyncClient(base_url=url(server), timeout=60) as client,
    ):
        return await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize("path", DOORS)
@on_a_loop
async def test_the_callers_span_is_the_parent(memory, path):
    body = {"model": "demo", **DOORS[path]}
    answer = await posts(path, body, config={"served_model_name": "demo"})
    assert answer.status_code == 200, answer.text
    whole, stages = only(memory)
    assert [*stages] == STAGES
    assert whole.kind is SpanKind.SERVER
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    assert dict(whole.context.trace_state) == {"vendor": "1"}
    assert whole.attributes["gen_ai.request.id"] == "mine" == answer.headers["x-request-id"]
    assert all(one.kind is SpanKind.INTERNAL for one in stages.values())


@pytest.mark.parametrize("path", POOLING)
@on_a_loop
async def test_so_it_is_of_each_text_that_is_pooled(memory, path):
    answer = await posts(path, {"model": "demo", **POOLING[path]}, pooling="last")
    assert answer.status_code == 200, answer.text
    found = requests(memory)
    assert len(found) == 2
    for whole, stages in found:
        assert [*stages] == ["queue", "prefill"]
        assert whole.kind is SpanKind.SERVER
        assert f"{whole.parent.span_id:016x}" == PARENT


@on_a_loop
async def test_several_prompts_are_several_requests_of_one_caller(memory):
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3}
    await posts("/v1/completions", body)
    found = requests(memory)
    assert len(found) == 2
    assert {f"{whole.parent.span_id:016x}" for whole, _ in found} == {PARENT}


@on_a_loop
async def test_the_model_has_the_name_that_clients_use(memory):
    await posts("/v1/chat/completions", CHAT, config={"served_model_name": ("bard", "poet")})
    whole, _ = only(memory)
    assert whole.attributes["gen_ai.request.model"] == "bard"
    assert whole.attributes["gen_ai.operation.name"] == "chat"


@on_a_loop
async def test_each_request_of_a_connection_has_its_own_parent(memory):
    async with (
        here(**FAST) as server,
        httpx.AsyncClient(base_url=url(server), timeout=60) as client,
    ):
        for headers in (
            HEADERS,
            {},
            {"traceparent": "nonsense"},
            {"traceparent": traceparent("00")},
        ):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    first, *others = requests(memory)
    assert f"{first[0].parent.span_id:016x}" == PARENT
    assert [whole.parent for whole, _ in others] == [None, None], "the last is not sampled"


@on_a_loop
async def test_two_parents_are_none(memory):
    twice = [("traceparent", traceparent())] * 2
    await posts("/v1/chat/completions", CHAT, headers=twice)
    whole, _ = only(memory)
    assert whole.parent is None


@on_a_loop
async def test_a_conversation_that_does_not_fit_is_an_error(memory):
    long = {**CHAT, "messages": [{"role": "user", "content": "Speak. " * 400}]}
    answer = await posts("/v1/chat/completions", long)
    assert answer.status_code == 400
    whole, _ = only(memory)
    assert whole.status.status_code is StatusCode.ERROR
    assert "Speak" not in whole.to_json()


@on_a_loop
async def test_a_client_that_hangs_up_aborts_its_request(memory):
    body = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    async with here(**FAST) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(posted("/v1/completions", body))
        await reader.readuntil(b"data: ")
        await hang_up(writer)
        await settled(server.llm)
    whole, _ = only(memory)
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert whole.status.status_code is StatusCode.UNSET
