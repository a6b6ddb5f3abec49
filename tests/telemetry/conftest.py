"""What tests of spans share: an exporter in memory in place of the collector."""

import os

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nanoactor.telemetry import exporting


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Those of the machine that the tests run on decide nothing."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def memory(monkeypatch):
    """All engines of a test export into it; complete once they are closed."""
    found = InMemorySpanExporter()
    monkeypatch.setattr(exporting, "otlp_exporter", lambda endpoint: found)
    return found
