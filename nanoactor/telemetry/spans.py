"""Spans of a finished request, in a form that does not depend on OpenTelemetry."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nanoactor.errors import EngineClosed
from nanoactor.models.sampling.columns import split_rows, unpack
from nanoactor.recovery.journal import Entry
from nanoactor.telemetry.origin import Origin

Value = str | float | Sequence[str]
_DECIMAL_PLACES = 6
"""Number of decimal places to which sampling parameters are rounded. They are stored as float32, so
that 0.7 would otherwise become 0.699999988."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Statistics of a finished request, for its spans. They contain no text of the prompt or the
    output. Times are `time.monotonic()` in seconds; None if the request ended before that stage or
    the time is unknown."""

    request_id: str
    model: str
    operation: str
    """Kind of the request: "chat", "text_completion", "embeddings" or "score"."""
    arrival: float
    finished: float
    scheduled: float | None = None
    """Start of the request's first step on the device."""
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    """Number of prompt tokens; 0 if the prompt was never tokenized."""
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    """Finish reason of each sequence: "stop", "length", "abort" or "error". Empty for pooling
    requests, which generate no text."""
    parameters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Sampling parameters, by their names in OpenTelemetry's GenAI conventions, without the prefix
    `gen_ai.request.`."""
    error: str = ""
    """Class of the error that ended the request; empty if there was none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Description of a span. Times are `time.monotonic()` in seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    error: str = ""


def finished_request(entry: Entry, model: str, pooled: str, origin: Origin) -> FinishedRequest:
    """Collect the statistics of a request that has just ended from its journal entry, the record of
    its output. `pooled` is the operation name of pooling requests, "embeddings" or "score"."""
    metrics, spec, error = entry.metrics, entry.submit.spec, entry.error
    if entry.aborted and isinstance(error, EngineClosed):
        error = None  # its caller had ended it before the engine was closed
    first = entry.answers[0].terminal
    operation = "text_completion" if entry.submit.chat is None else "chat"
    return FinishedRequest(
        request_id=origin.request_id or entry.request_id,
        model=origin.model or model,
        operation=pooled if spec.pools else operation,
        arrival=metrics.arrival_time,
        # One answer's error ends a request whose other answers have no end of their own.
        finished=metrics.finished_time or time.monotonic(),
        scheduled=metrics.first_scheduled_time,
        first_token=None if spec.pools else metrics.first_token_time,
        last_token=None if spec.pools else metrics.last_token_time,
        prompt_tokens=len(entry.prompt_token_ids),
        cached_tokens=first.cached_tokens if first is not None else 0,
        output_tokens=sum(len(answer.token_ids) for answer in entry.answers),
        finish_reasons=() if spec.pools else tuple(_reasons(entry)),
        parameters={} if spec.pools else _parameters(entry),
        error="" if error is None else type(error).__name__,
    )


def _reasons(entry: Entry) -> Sequence[str]:
    without = "abort" if entry.aborted else "error"
    reasons = [one.terminal.reason if one.terminal else without for one in entry.answers]
    return [reason if reason in ("stop", "length", "abort") else "error" for reason in reasons]


def _parameters(entry: Entry) -> dict[str, float]:
    spec = entry.submit.spec
    row = unpack(split_rows(spec.sampling)[0])
    found: dict[str, float] = {
        "temperature": round(row.temperature, _DECIMAL_PLACES),
        "top_p": round(row.top_p, _DECIMAL_PLACES),
    }
    if spec.stopping.max_tokens:  # 0 means as many as fit
        found["max_tokens"] = int(spec.stopping.max_tokens)
    if len(entry.answers) > 1:
        found["choice.count"] = len(entry.answers)
    return found


def spans_of(request: FinishedRequest) -> list[Span]:
    """Return the span of a request, followed by its child spans, one each for queue, prefill and
    decode. A stage without a known start or end has no span."""
    # The times come from several processes, so keep each stage from starting before the last ended.
    ends = max(request.arrival, request.finished)
    scheduled, first, last = _in_order(
        request.arrival, (request.scheduled, request.first_token, request.last_token), ends
    )
    spans = []
    if scheduled is not None:
        spans.append(Span("queue", request.arrival, scheduled))
        # A pooling request has no token; its only step ends with it.
        spans.append(Span("prefill", scheduled, ends if first is None else first))
    if first is not None and last is not None:
        spans.append(Span("decode", first, last))
    latencies = {
        "time_in_queue": _duration(request.arrival, scheduled),
        "time_to_first_token": _duration(request.arrival, first),
        "time_in_model_prefill": _duration(scheduled, first),
        "time_in_model_decode": _duration(first, last),
        "time_in_model_inference": _duration(scheduled, last),
        "e2e": ends - request.arrival,
    }
    return [
        Span("llm_request", request.arrival, ends, _attributes(request, latencies), request.error),
        *spans,
    ]


def _in_order(
    minimum: float, times: Iterable[float | None], maximum: float
) -> Iterator[float | None]:
    """Yield the times, adjusted so that they never decrease and stay between `minimum` and
    `maximum`. None stays None."""
    for time_ in times:
        if time_ is not None:
            minimum = min(max(minimum, time_), maximum)
        yield None if time_ is None else minimum


def _duration(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _attributes(
    request: FinishedRequest, latencies: Mapping[str, float | None]
) -> dict[str, Value]:
    """Return a request's span attributes, named as in OpenTelemetry's GenAI conventions, or as in
    vLLM where these have no name. `latencies` are in seconds; unknown ones (None) are left out."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "nanoactor",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.request_id,
    }
    found |= {f"gen_ai.request.{name}": value for name, value in request.parameters.items()}
    if request.prompt_tokens:
        found["gen_ai.usage.input_tokens"] = request.prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = request.cached_tokens
    if request.finish_reasons:
        found["gen_ai.usage.output_tokens"] = request.output_tokens
        found["gen_ai.response.finish_reasons"] = request.finish_reasons
    if request.error:
        found["error.type"] = request.error
    for name, seconds in latencies.items():
        if seconds is not None:
            found[f"gen_ai.latency.{name}"] = seconds
    return found
