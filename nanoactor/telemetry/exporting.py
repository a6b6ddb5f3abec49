"""Export of spans through OpenTelemetry's SDK. Imported only if telemetry is on."""

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
"""Maximum time, in seconds, for which closing waits until the last spans are sent."""
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
"""Log records of the SDK that were intercepted in this context; None outside our calls. The SDK
would log every lost batch and every malformed header, but we log only the first loss."""


def _intercept_record(record: logging.LogRecord) -> bool:
    """Return True if the SDK's loggers may log a record. Store the records of our own calls in
    `_RECORDS` instead, and pass on those of other users of the SDK."""
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
                f"{_PROTOCOL}: unset the variable, and point otlp_traces_endpoint at the "
                "collector's HTTP port, usually 4318"
            )
        if protocol:  # the more specific variable takes precedence
            break
    return OTLPSpanExporter(endpoint)


class _LossLog:
    """Log of lost spans. It contains one warning for each engine: the first loss."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._is_logged = False

    def note(self, reason: str) -> None:
        """Log the reason for lost spans, unless a loss was logged before."""
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "spans for %s are lost; requests are not affected: %s (logged once)",
                self._endpoint,
                reason,
            )


class _MonitoredExporter(SpanExporter):
    """Wrapper of an exporter. It reports the first failure in our log, and keeps the SDK from
    logging every one."""

    def __init__(self, exporter: SpanExporter, losses: _LossLog) -> None:
        self._exporter, self._losses = exporter, losses
        self.is_failing = False
        """True if the latest batch was lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch of spans without raising errors. Called on the SDK's thread."""
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
        """Shut down the exporter, and give up any attempt to send that is in progress. May be
        called twice, and on any thread."""
        token = _RECORDS.set([])
        try:
            self._exporter.shutdown()
        finally:
            _RECORDS.reset(token)


class Telemetry:
    """Exporter of OpenTelemetry spans for the requests of one engine, or of one HTTP server in
    front of several engines."""

    def __init__(self, endpoint: str, model: str, pooled: str) -> None:
        """Start the SDK's thread, which sends spans. `pooled` is the operation name of pooling
        requests, "embeddings" or "score". Raises `InvalidConfig` if an environment variable of
        OpenTelemetry is invalid."""
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
        """Return a function that creates the same journal entry (the record of a request's output)
        as `make_entry`, and exports spans when the request ends."""

        def make_instrumented(uid: int) -> Entry:
            entry = make_entry(uid)
            entry.on_end = self.end_callback(origin)
            return entry

        return make_instrumented

    def end_callback(self, origin: Origin) -> Callable[[Entry], None]:
        """Return a callback for the end of a request, which creates the request's spans and queues
        them."""
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
        """Send the queued spans, and wait until they are sent, for at most `CLOSE_SECONDS`. Do not
        wait if the previous batch failed. Spans that have not been sent by then are lost."""
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
        """Send the queued spans without waiting, because the engine was dropped."""
        self._shut_down(lambda: None)

    def _shut_down(self, then: Callable[[], None]) -> bool:
        """Shut down the SDK on a daemon thread, which does not delay the end of the process, and
        then call `then` on that thread. Return False if there is nothing to shut down."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is None:
            return False

        def run() -> None:
            provider.shutdown()
            then()

        threading.Thread(target=run, name="nanoactor-telemetry", daemon=True).start()
        return True


def _resource() -> Resource:
    """Return the OpenTelemetry resource that the environment variables describe, with our name and
    version as defaults."""
    found, version = Resource.create(), Resource({SERVICE_VERSION: nanoactor.__version__})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the SDK's default
        found = found.merge(Resource({SERVICE_NAME: "nanoactor"}))
    return version.merge(found)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
