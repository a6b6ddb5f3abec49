"""Telemetry is off unless it is asked for, and says what is wrong with how it is asked for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from nanoactor import AsyncLLM, EngineConfig, cli
from nanoactor.cli.options import given_values
from nanoactor.errors import InvalidConfig
from nanoactor.ray_serve import launch
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig
from tests.telemetry.harness import FAST, URL

OFF = """
import asyncio, sys
from nanoactor import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM("demo", device="simulated:1", placement="single") as llm:
        headers = {"traceparent": "00-" + 32 * "a" + "-" + 16 * "b" + "-01"}
        async for _ in llm.generate("a", SamplingParams(max_tokens=2), trace_headers=headers):
            pass

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_nothing_of_opentelemetry_is_imported_unless_it_is_on():
    run = subprocess.run(
        [sys.executable, "-c", OFF], capture_output=True, text=True, timeout=240, check=True
    )
    assert run.stdout == "[]\n"


def test_without_the_extra_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "nanoactor.telemetry.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfig, match=r'pip install "nanoactor\[otel\]"'):
        AsyncLLM("demo", **FAST)


def test_so_it_does_before_ray_is_started(monkeypatch):
    monkeypatch.delitem(sys.modules, "nanoactor.telemetry.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr(launch, "check_ray", lambda: None)
    monkeypatch.delattr(launch, "read_model_files")  # what comes next
    config = EngineConfig("demo", otlp_traces_endpoint=URL)
    with pytest.raises(InvalidConfig, match=r'pip install "nanoactor\[otel\]"'):
        asyncio.run(launch.serve_replicas(config, ServerConfig(), FleetConfig(replicas=2)))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("localhost:4318/v1/traces", "must begin with http:// or https://"),
        ("collector", "must begin with http:// or https://"),
        ("", "must begin with http:// or https://"),
        ("grpc://collector:4317", "gRPC is not supported"),
        ("http://collector:4317", "that of gRPC"),
        ("http://collector:4318", "has no path"),
        ("http:///v1/traces", "got 'http:///v1/traces'"),
        ("http://collector:port/v1/traces", "port"),
        ("http://collector:99999/v1/traces", "[Pp]ort"),
        ("http://[::1/v1/traces", "Invalid IPv6 URL"),
        ("http://a b/v1/traces", "got"),
        (4318, "got 4318"),
    ],
)
def test_a_malformed_endpoint_is_refused_with_an_example(given, told):
    with pytest.raises(InvalidConfig, match=told) as refused:
        EngineConfig("demo", otlp_traces_endpoint=given)
    assert "otlp_traces_endpoint" in str(refused.value)
    assert "http://localhost:4318/v1/traces" in str(refused.value)


def test_a_password_in_the_endpoint_is_refused_and_not_shown():
    with pytest.raises(InvalidConfig, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        EngineConfig("demo", otlp_traces_endpoint="https://me:secret@host/v1/traces")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("given", [URL, "https://[::1]/otlp/v1/traces?tenant=a", "http://h/", None])
def test_other_endpoints_are_accepted(given):
    assert EngineConfig("demo", otlp_traces_endpoint=given).otlp_traces_endpoint == given


@pytest.mark.parametrize("kind", ["", "TRACES_"])
def test_another_protocol_of_the_environment_is_refused(monkeypatch, kind):
    variable = f"OTEL_EXPORTER_OTLP_{kind}PROTOCOL"
    monkeypatch.setenv(variable, "grpc")
    with pytest.raises(InvalidConfig, match=f"{variable} is 'grpc'.*http/protobuf"):
        AsyncLLM("demo", **FAST)


def test_the_more_specific_protocol_counts(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    AsyncLLM("demo", **FAST)


def test_a_queue_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(InvalidConfig, match="OTEL_BSP_"):
        AsyncLLM("demo", **FAST)


def test_the_servers_flag_sets_the_engines_option():
    args = cli._parse(["serve", "demo", "--otlp-traces-endpoint", URL])
    assert given_values(args, EngineConfig) == {"otlp_traces_endpoint": URL}


def test_an_engine_that_is_dropped_leaves_no_thread_of_the_sdk(memory):
    llm = AsyncLLM("demo", **FAST)
    (worker,) = [one for one in threading.enumerate() if "BatchSpan" in one.name]
    del llm
    worker.join(60)
    assert not worker.is_alive()
