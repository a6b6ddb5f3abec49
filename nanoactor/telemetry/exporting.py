"""Export of spans through OpenTelemetry's SDK. Imported only if telemetry is switched on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import nanoactor
from nanoactor.errors import InvalidConfig
from nanoactor.recovery.journal import Entry
from nanoactor.telemetry.origin import Origin
from nanoactor.telemetry.spans import FinishedRequest, finished_request, spans_of

log = logging.getLogger("nanoactor.telemetry")

CLOSE_SECONDS = 3.0
"""Maximum seconds that closing waits for the last spans to be sent."""
_PROTOCOL = "http/protobuf"
_PROPAGATOR = TraceContextTextMapPropagator()
_QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
_SDK_LOGGERS = (
    _QUEUE_LOGGER,
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
_RECORDS: contextvars.ContextVar[list[logging.LogRecord] | None] = contextvars.ContextVar(
    "records of the SDK", default=None
)
"""Records that the SDK logs while it works for us. It logs one for each lost batch and for each
malformed header; we log one for the first loss."""


def _intercept_record(record: logging.LogRecord) -> bool:
    """Keep a record from the log if it is ours; pass on what the SDK logs for other users."""
    records = _RECORDS.get()
    if records is not None:
        records.append(record)
    return records is None


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter that sends protobuf over HTTP. Raises `InvalidConfig` if the environment
    selects another protocol."""
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        protocol = os.environ.get(variable)
        if protocol and protocol != _PROTOCOL:
            raise InvalidConfig(
                f"{variable} is {protocol!r:.100}, but nanoactor exports spans only as "
                f"{_PROTOCOL}: unset the variable, and give otlp_traces_endpoint the collector's "
                "HTTP port, usually 4318"
            )
        if protocol:  # the more specific variable takes precedence
            break
    return OTLPSpanExporter(endpoint)


class _LossLog:
    """Log of lost spans: one line for an engine, whatever happens later."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._is_logged = False

    def note(self, reason: str) -> None:
        """Log a loss unless one was logged before."""
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "spans for %s are lost; requests are not affected: %s (logged once)",
                self._endpoint,
                reason,
            )


class _MonitoredExporter(SpanExporter):
    """An exporter whose failures are noted, instead of logged by the SDK."""

    def __init__(self, exporter: SpanExporter, losses: _LossLog) -> None:
        self._exporter, self._losses = exporter, losses
        self.is_failing = False
        """True if the latest batch was lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch, on the SDK's thread."""
        records: list[logging.LogRecord] = []
        token = _RECORDS.set(records)
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # the SDK's thread must not end
            result, reason = SpanExportResult.FAILURE, repr(error)
        else:
            # The first names the cause, the last what the SDK did after it had tried again.
            lines = dict.fromkeys(one.getMessage() for one in (*records[:1], *records[-1:]))
            reason = "; ".join(lines) or "the exporter gave no reason"
        finally:
            _RECORDS.reset(token)
        self.is_failing = result is not SpanExportResult.SUCCESS
        if self.is_failing:
            self._losses.note(reason)
        return result

    def shutdown(self) -> None:
        """Give up what is still being tried. May be called twice, and on any thread."""
        token = _RECORDS.set([])
        try:
            self._exporter.shutdown()
        finally:
            _RECORDS.reset(token)


class Telemetry:
    """Spans of the requests of one engine, or of one ingress."""

    def __init__(self, endpoint: str, model: str, pooled: str) -> None:
        """Start the SDK's thread, which sends spans. `pooled` is the operation of pooling requests.
        Raises `InvalidConfig` if a variable of the environment is invalid."""
        self._model, self._pooled = model, pooled
        self._losses = _LossLog(endpoint)
        self._has_failed = False
        for name in _SDK_LOGGERS:
            logging.getLogger(name).addFilter(_intercept_record)  # adding it again changes nothing
        self._exporter = _MonitoredExporter(otlp_exporter(endpoint), self._losses)
        # Closing is ours: the SDK's would wait for half a minute when the interpreter ends.
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        try:
            provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except ValueError as error:
            raise InvalidConfig(f"a variable OTEL_BSP_* is invalid: {error}") from error
        self._provider: TracerProvider | None = provider
        self._tracer: Tracer | None = provider.get_tracer("nanoactor", nanoactor.__version__)

    def instrument(
        self, make_entry: Callable[[int], Entry], origin: Origin
    ) -> Callable[[int], Entry]:
        """Return a factory for the same journal entry, whose end is noted."""

        def make_instrumented(uid: int) -> Entry:
            entry = make_entry(uid)
            entry.on_end = self.end_callback(origin)
            return entry

        return make_instrumented

    def end_callback(self, origin: Origin) -> Callable[[Entry], None]:
        """Return a function that makes the spans of a request when it has ended."""
        return functools.partial(self._note, origin)

    def _note(self, origin: Origin, entry: Entry) -> None:
        records: list[logging.LogRecord] = []
        token = _RECORDS.set(records)
        try:
            self.emit(finished_request(entry, self._model, self._pooled, origin), origin)
        except Exception:  # a span is never worth a request
            if not self._has_failed:
                self._has_failed = True
                log.exception("the spans of a request cannot be made (logged once)")
        finally:
            _RECORDS.reset(token)
        if any(record.name == _QUEUE_LOGGER for record in records):
            self._losses.note("requests end faster than the collector accepts their spans")

    def emit(self, request: FinishedRequest, origin: Origin) -> None:
        """Create the spans of a finished request, and queue them for the SDK's thread."""
        if self._tracer is None:
            return
        to_epoch = time.time_ns() - time.monotonic_ns()
        whole, *stages = spans_of(request)
        parent = self._tracer.start_span(
            whole.name,
            _PROPAGATOR.extract(origin.headers, Context()),
            SpanKind.SERVER if origin.is_http else SpanKind.INTERNAL,
            whole.attributes,
            start_time=to_epoch + _ns(whole.start),
        )
        if not parent.is_recording():  # not sampled
            return
        if whole.error:
            # Only its class: messages of errors may quote prompts.
            parent.set_status(Status(StatusCode.ERROR, whole.error))
        inside = set_span_in_context(parent, Context())
        for stage in stages:
            start = to_epoch + _ns(stage.start)
            child = self._tracer.start_span(stage.name, inside, start_time=start)
            child.end(to_epoch + _ns(stage.end))
        parent.end(to_epoch + _ns(whole.end))

    async def close(self) -> None:
        """Send the spans that are queued; after `CLOSE_SECONDS`, or if the collector has not
        answered before, give them up."""
        closed, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify_closed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(closed.set)

        if not self._shut_down(notify_closed):
            return
        if not self._exporter.is_failing:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await closed.wait()
            except TimeoutError:
                self._losses.note(
                    "the engine was closed, and the collector did not accept the last spans "
                    f"within {CLOSE_SECONDS:g} s"
                )
        self._exporter.shutdown()

    def abandon(self) -> None:
        """Send the spans that are queued, without waiting: the engine was dropped."""
        self._shut_down(lambda: None)

    def _shut_down(self, then: Callable[[], None]) -> bool:
        """Shut down the SDK's part on a thread that no end of the process waits for, and call
        `then` there; return False if there is nothing to shut down."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is None:
            return False

        def run() -> None:
            provider.shutdown()
            then()

        threading.Thread(target=run, name="nanoactor-telemetry", daemon=True).start()
        return True


def _resource() -> Resource:
    """Return the resource that the environment describes. What it does not name is ours."""
    found, version = Resource.create(), Resource({SERVICE_VERSION: nanoactor.__version__})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the SDK's default
        found = found.merge(Resource({SERVICE_NAME: "nanoactor"}))
    return version.merge(found)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
