"""A collector gets what was made; one that is down, slow or full costs no request anything."""

import asyncio
import logging
import socket
import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.telemetry import exporting
from tests.engine.harness import collect, on_a_loop
from tests.telemetry.harness import FAST, STAGES, TRACE, collector, silent, traceparent

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def logged(caplog):
    """What the log has of it, the SDK's own lines included."""
    names = ("nanoactor.telemetry", "opentelemetry")
    return [
        one.getMessage()
        for one in caplog.records
        if one.name.startswith(names) and one.levelno >= logging.WARNING
    ]


@pytest.fixture
def closed_port():
    """A port that nobody listens on, as it is bound but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@on_a_loop
async def test_a_collector_gets_the_spans_as_protobuf(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer key,x-tenant=me")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "bards")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with (
        collector() as found,
        AsyncLLM("demo", **{**FAST, "otlp_traces_endpoint": found.url}) as llm,
    ):
        await collect(llm, "a", PARAMS, trace_headers={"traceparent": traceparent()})
    assert sorted(span.name for span in found.spans) == sorted(["llm_request", *STAGES])
    assert {span.trace_id.hex() for span in found.spans} == {TRACE}
    (headers,) = found.headers
    assert (headers["Authorization"], headers["x-tenant"]) == ("Bearer key", "me")
    assert headers["Content-Type"] == "application/x-protobuf"
    assert found.resource["service.name"] == "bards"
    assert found.resource["deployment.environment.name"] == "test"
    assert found.resource["service.version"]
    assert logged(caplog) == []


@on_a_loop
async def test_a_collector_that_is_down_is_told_of_once(closed_port, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # less than the SDK waits to try again
    options = {**FAST, "otlp_traces_endpoint": f"http://127.0.0.1:{closed_port}/v1/traces"}
    async with AsyncLLM("demo", **options) as llm:
        for _ in range(2):
            assert (await collect(llm, "a", PARAMS)).finished
            await asyncio.to_thread(llm._telemetry._provider.force_flush)
        assert llm._telemetry._exporter.is_failing
        assert (await collect(llm, "a", PARAMS)).finished
    (line,) = logged(caplog)
    assert str(closed_port) in line
    assert "logged once" in line


@on_a_loop
async def test_neither_requests_nor_the_end_wait_for_a_silent_collector(monkeypatch, caplog):
    monkeypatch.setattr(exporting, "CLOSE_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    async with silent() as (address, asked):
        async with AsyncLLM("demo", **{**FAST, "otlp_traces_endpoint": address}) as llm:
            await collect(llm, "a", PARAMS)
            await asked.wait()
            for _ in range(20):
                assert (await collect(llm, "a", PARAMS)).finished
        # The engine is closed, although its collector still has not answered.
        (line,) = logged(caplog)
    assert "did not accept the last spans within 0.05 s" in line


class Blocked(SpanExporter):
    """It takes a batch, and is then busy until it is told otherwise."""

    def __init__(self):
        self.began, self.goes_on = threading.Event(), threading.Event()

    def export(self, spans):
        self.began.set()
        self.goes_on.wait()
        return SpanExportResult.SUCCESS


@on_a_loop
async def test_a_full_queue_drops_spans_and_is_told_of_once(monkeypatch, caplog):
    blocked = Blocked()
    monkeypatch.setattr(exporting, "otlp_exporter", lambda endpoint: blocked)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    async with AsyncLLM("demo", **FAST) as llm:
        try:
            for _ in range(3):
                assert (await collect(llm, "a", PARAMS)).finished
            assert await asyncio.to_thread(blocked.began.wait, 60)
        finally:
            blocked.goes_on.set()
    (line,) = logged(caplog)
    assert "faster than the collector accepts their spans" in line


@on_a_loop
async def test_what_others_log_through_the_sdk_stays_in_the_log(memory, caplog):
    logger = logging.getLogger("opentelemetry.sdk._shared_internal")
    async with AsyncLLM("demo", **FAST) as llm:
        await collect(llm, "a", PARAMS)
        logger.warning("of another exporter")
    assert logged(caplog) == ["of another exporter"]


@on_a_loop
async def test_an_exporter_that_raises_costs_no_request(monkeypatch, caplog):
    class Broken(SpanExporter):
        def export(self, spans):
            raise OSError("no network")

    monkeypatch.setattr(exporting, "otlp_exporter", lambda endpoint: Broken())
    async with AsyncLLM("demo", **FAST) as llm:
        assert (await collect(llm, "a", PARAMS)).finished
    (line,) = logged(caplog)
    assert "no network" in line
