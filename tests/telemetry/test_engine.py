"""Spans of requests of the embedded API, and of a fleet."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from nanoactor import AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from nanoactor.errors import EngineClosed, InvalidRequest
from nanoactor.fleet.client import FleetLLM
from tests.engine.harness import collect, on_a_loop, settled
from tests.fleet.local import Local, engines
from tests.product_files import ROOT
from tests.telemetry.harness import (
    FAST,
    PARENT,
    STAGES,
    TRACE,
    URL,
    only,
    requests,
    traceparent,
)

TEXT = "Zanzibar, quoth the walrus"
DELTA = RequestOutputKind.DELTA
IMAGE = ROOT / "examples" / "three-digits.png"


def sampling(**changes):
    return SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.7, **changes})


@on_a_loop
async def test_a_request_has_a_span_with_its_stages(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        output = await collect(llm, TEXT, sampling(top_p=0.9), request_id="mine")
        metrics = output.metrics
    whole, stages = only(memory)
    assert [*stages] == STAGES
    assert (whole.kind, whole.parent, whole.status.status_code) == (
        SpanKind.INTERNAL,
        None,
        StatusCode.UNSET,
    )
    found = whole.attributes
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "demo"
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.temperature"] == 0.7
    assert found["gen_ai.request.top_p"] == 0.9
    assert found["gen_ai.request.max_tokens"] == 4
    assert found["gen_ai.usage.input_tokens"] == len(output.prompt_token_ids)
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    # The times are the engine's own.
    assert found["gen_ai.latency.time_to_first_token"] == metrics.time_to_first_token
    assert found["gen_ai.latency.e2e"] == metrics.finished_time - metrics.arrival_time
    assert found["gen_ai.latency.time_in_queue"] == (
        metrics.first_scheduled_time - metrics.arrival_time
    )
    decode = stages["decode"].end_time - stages["decode"].start_time
    assert abs(decode - 1e9 * (metrics.last_token_time - metrics.first_token_time)) < 1000
    assert whole.instrumentation_scope.name == "nanoactor"
    assert whole.resource.attributes["service.name"] == "nanoactor"


@on_a_loop
async def test_no_span_contains_text(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        said = (await collect(llm, TEXT, sampling(max_tokens=20, stop=["qqqq"]))).outputs[0].text
        chat = [{"role": "user", "content": TEXT}]
        await collect(llm, chat, sampling())
        with pytest.raises(InvalidRequest):  # its message might quote the prompt
            await collect(llm, TEXT * 100, sampling())
    shown = "".join(one.to_json() for one in memory.get_finished_spans())
    words = said.split()
    assert len(words) > 3
    # A word alone may be part of a name, as "service" is of `service.version`.
    for text in ("Zanzibar", "walrus", "qqqq", *map(" ".join, itertools.pairwise(words))):
        assert text not in shown
    assert [whole.attributes["gen_ai.operation.name"] for whole, _ in requests(memory)] == [
        "text_completion",
        "chat",
        "text_completion",
    ]


# -- parents ------------------------------------------------------------------------------


@on_a_loop
async def test_the_callers_span_is_the_parent(memory):
    headers = {"Traceparent": traceparent(), "tracestate": "vendor=1,other=2", "cookie": "x"}
    async with AsyncLLM("demo", **FAST) as llm:
        await collect(llm, TEXT, sampling(), trace_headers=headers)
    whole, stages = only(memory)
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    assert whole.parent.is_remote
    assert dict(whole.context.trace_state) == {"vendor": "1", "other": "2"}
    assert {f"{one.context.trace_id:032x}" for one in stages.values()} == {TRACE}


MALFORMED = [
    "",
    "nonsense",
    f"00-{TRACE}-{PARENT}",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE}-{PARENT}-zz",
    f"00-{TRACE}-{PARENT}-01" + "x" * 4096,
]


@on_a_loop
async def test_a_malformed_parent_begins_a_new_trace(memory, caplog):
    async with AsyncLLM("demo", **FAST) as llm:
        for parent in MALFORMED:
            await collect(llm, TEXT, sampling(), trace_headers={"traceparent": parent})
        headers = {"traceparent": traceparent(), "tracestate": "=;=," * 200}
        await collect(llm, TEXT, sampling(), trace_headers=headers)
    *strangers, last = [whole for whole, _ in requests(memory)]
    assert len(strangers) == len(MALFORMED)
    assert all(one.parent is None for one in strangers)
    traces = {one.context.trace_id for one in strangers}
    assert len(traces) == len(MALFORMED)
    assert f"{last.context.trace_id:032x}" == TRACE, "only its state is malformed"
    # Anyone can send such headers: they must not fill the log.
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@on_a_loop
async def test_a_parent_of_a_later_version_is_understood(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        parent = f"01-{TRACE}-{PARENT}-01-more"
        await collect(llm, TEXT, sampling(), trace_headers={"traceparent": parent})
    whole, _ = only(memory)
    assert f"{whole.parent.span_id:016x}" == PARENT


@on_a_loop
async def test_what_its_caller_does_not_sample_has_no_spans(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        await collect(llm, TEXT, sampling(), trace_headers={"traceparent": traceparent("00")})
    assert memory.get_finished_spans() == ()


@on_a_loop
async def test_the_environment_chooses_the_sampler(memory, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with AsyncLLM("demo", **FAST) as llm:
        await collect(llm, TEXT, sampling())
        await collect(llm, TEXT, sampling(), trace_headers={"traceparent": traceparent()})
    whole, _ = only(memory)
    assert f"{whole.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("headers", ["x", {"traceparent": 5}, [("traceparent", "x")]])
def test_headers_that_are_no_strings_are_refused(headers):
    llm = AsyncLLM("demo", device="simulated:1")
    with pytest.raises(InvalidRequest, match="trace_headers must be a dict of strings"):
        llm.generate(TEXT, trace_headers=headers)


# -- kinds of requests, and of ends -------------------------------------------------------


@on_a_loop
async def test_several_answers_are_one_request(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        output = await collect(llm, TEXT, sampling(n=3))
    whole, stages = only(memory)
    assert [*stages] == STAGES
    assert whole.attributes["gen_ai.request.choice.count"] == 3
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert whole.attributes["gen_ai.latency.e2e"] == (
        output.metrics.finished_time - output.metrics.arrival_time
    )


@on_a_loop
async def test_submitted_prompts_have_a_span_each(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        headers = {"traceparent": traceparent()}
        for request in llm.submit([TEXT, TEXT + "!"], sampling(), trace_headers=headers):
            async for _ in request:
                pass
    found = requests(memory)
    assert len(found) == 2
    assert {f"{whole.parent.span_id:016x}" for whole, _ in found} == {PARENT}


@on_a_loop
async def test_a_beam_search_is_one_request(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        await llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=3))
        await settled(llm)
    whole, _ = only(memory)
    assert whole.attributes["gen_ai.request.choice.count"] == 2


@on_a_loop
async def test_a_vector_is_an_embedding(memory):
    async with AsyncLLM("demo", **FAST, pooling="last") as llm:
        headers = {"traceparent": traceparent()}
        output = await llm.embed(TEXT, trace_headers=headers)
        await llm.score(TEXT, "another", trace_headers=headers)
    found = requests(memory)
    assert len(found) == 3, "the score is of two vectors"
    assert {f"{whole.parent.span_id:016x}" for whole, _ in found} == {PARENT}
    whole, stages = found[0]
    assert [*stages] == ["queue", "prefill"]
    assert whole.attributes["gen_ai.operation.name"] == "embeddings"
    assert whole.attributes["gen_ai.usage.input_tokens"] == len(output.prompt_token_ids)
    assert "gen_ai.request.temperature" not in whole.attributes


@on_a_loop
async def test_a_request_whose_image_is_opened_first_keeps_its_parent(memory):
    parts = [{"type": "image", "image": str(IMAGE)}, {"type": "text", "text": "?"}]
    async with AsyncLLM("demo-vl", **FAST) as llm:
        chat = [{"role": "user", "content": parts}]
        await collect(llm, chat, sampling(), trace_headers={"traceparent": traceparent()})
    whole, stages = only(memory)
    assert [*stages] == STAGES
    assert f"{whole.parent.span_id:016x}" == PARENT


@on_a_loop
async def test_a_refused_prompt_is_an_error(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        with pytest.raises(InvalidRequest):
            await collect(llm, TEXT * 100, sampling())
    whole, stages = only(memory)
    assert stages == {}, "it was never scheduled"
    assert (whole.status.status_code, whole.status.description) == (
        StatusCode.ERROR,
        "InvalidRequest",
    )
    assert whole.attributes["error.type"] == "InvalidRequest"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("error",)


@on_a_loop
async def test_a_request_whose_reader_leaves_is_aborted(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        stream = llm.generate(TEXT, sampling(max_tokens=400, output_kind=DELTA))
        async with contextlib.aclosing(stream):
            await anext(stream)
        await settled(llm)
    whole, stages = only(memory)
    assert whole.status.status_code is StatusCode.UNSET
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert 0 < whole.attributes["gen_ai.usage.output_tokens"] < 400
    assert [*stages] == STAGES


@on_a_loop
async def test_a_request_that_is_aborted_by_name(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        params = sampling(max_tokens=400, output_kind=DELTA)
        async for _ in llm.generate(TEXT, params, request_id="mine"):
            await llm.abort("mine")
    whole, stages = only(memory)
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert whole.status.status_code is StatusCode.UNSET
    assert "decode" in stages


@on_a_loop
async def test_what_the_engines_end_cuts_off_is_an_error(memory):
    llm = AsyncLLM("demo", **FAST)
    await llm.start()
    stream = llm.generate(TEXT, sampling(max_tokens=400, output_kind=DELTA))
    await anext(stream)
    await llm.close()
    with pytest.raises(EngineClosed):
        async for _ in stream:
            pass
    whole, stages = only(memory)
    assert whole.attributes["error.type"] == "EngineClosed"
    assert [*stages] == ["decode"], "nobody has told when its first step began"


@on_a_loop
async def test_a_request_that_is_not_accepted_has_no_span(memory):
    async with AsyncLLM("demo", **FAST) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate("", sampling())
    assert memory.get_finished_spans() == ()


@on_a_loop
async def test_spans_that_cannot_be_made_cost_no_request(memory, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("nanoactor.telemetry.exporting.spans_of", broken)
    async with AsyncLLM("demo", **FAST) as llm:
        for _ in range(3):
            assert (await collect(llm, TEXT, sampling())).finished
    (record,) = [one for one in caplog.records if one.name == "nanoactor.telemetry"]
    assert "logged once" in record.getMessage()


# -- several engines ----------------------------------------------------------------------


@on_a_loop
async def test_an_ingress_makes_the_spans_of_a_fleet(memory):
    async with engines(2, device="simulated:1") as found:
        local = Local()
        for llm in found:
            local.add(llm)
        config = dataclasses.replace(found[0].config, otlp_traces_endpoint=URL)
        async with FleetLLM(config, local) as llm:
            headers = {"traceparent": traceparent()}
            outputs = await asyncio.gather(
                *(collect(llm, TEXT, sampling(n=n), trace_headers=headers) for n in (1, 2))
            )
            stream = llm.generate(TEXT, sampling(max_tokens=400, output_kind=DELTA))
            async with contextlib.aclosing(stream):
                await anext(stream)
    assert all(output.finished for output in outputs)
    first, second, last = requests(memory)
    for whole, stages in (first, second):
        assert [*stages] == STAGES
        assert f"{whole.parent.span_id:016x}" == PARENT
        assert "gen_ai.usage.cache_read.input_tokens" in whole.attributes
    assert last[0].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert last[0].parent is None
