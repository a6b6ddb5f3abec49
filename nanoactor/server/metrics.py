"""Prometheus metrics: request latencies, and statistics of the engine's actors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import nanoactor
from nanoactor.requests.outputs import RequestMetrics
from nanoactor.server.vllm_metrics import with_vllm_names

disable_created_metrics()  # type: ignore[no-untyped-call]  # counter creation times are not used

FINISHED_REASONS = ("stop", "length", "abort", "error")
"""Finish reasons by which answers are counted."""

_LATENCY_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)
_LAG_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_TOKEN_BOUNDS = tuple(float(1 << power) for power in range(18))


class Histogram:
    """Histogram that is cheap to update for every token: `observe` can record a value several times
    at once."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """Create an empty histogram. `bounds` are the upper bounds of the buckets, in ascending
        order."""
        self._name = name
        self._text = text
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value` as `count` observations."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self) -> Metric:
        """Return the histogram with cumulative bucket counts, as Prometheus requires."""
        edges = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        buckets = [(edge, float(total)) for edge, total in zip(edges, totals, strict=True)]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return family


class Timer:
    """Latencies of one answer. They are measured when tokens reach the server's event loop, so that
    the client's reading speed has no influence."""

    def __init__(self, metrics: Metrics, times: RequestMetrics) -> None:
        self._metrics = metrics
        self._times = times
        self._last = 0.0
        self._tokens = 0

    @property
    def count(self) -> int:
        """Number of tokens received so far."""
        return self._tokens

    def add_tokens(self, count: int) -> None:
        """Record the arrival of `count` new tokens."""
        if not count:
            return
        times, metrics = self._times, self._metrics
        arrived = times.last_token_time or 0.0
        if not self._tokens:
            self._last = times.first_token_time or arrived
            metrics.ttft.observe(self._last - times.arrival_time)
            self._tokens, count = 1, count - 1
        if count:
            metrics.itl.observe((arrived - self._last) / count, count)
        self._last = arrived
        self._tokens += count

    def end(self, prompt: int | None) -> None:
        """Record the end of the answer. `prompt` is the number of prompt tokens, or None if another
        answer to the same prompt has recorded them."""
        times, metrics = self._times, self._metrics
        if prompt is not None and times.first_scheduled_time is not None:
            metrics.queue.observe(times.first_scheduled_time - times.arrival_time)
            self._observe_phases(times.first_scheduled_time)
        metrics.e2e.observe((times.finished_time or self._last) - times.arrival_time)
        if prompt is not None:
            metrics.prompt_tokens.observe(prompt)
        metrics.output_tokens.observe(self._tokens)
        if self._tokens > 1 and times.first_token_time is not None:
            metrics.tpot.observe((self._last - times.first_token_time) / (self._tokens - 1))

    def _observe_phases(self, first_step: float) -> None:
        """Record the durations of prefill, of decode and of both. `first_step` is the start of the
        first step, in seconds of `time.monotonic()`."""
        metrics, first = self._metrics, self._times.first_token_time
        if first is None:
            return
        metrics.prefill.observe(first - first_step)
        metrics.decode.observe(max(0.0, self._last - first))
        metrics.inference.observe(max(first, self._last) - first_step)


class Metrics(Collector):
    """All metrics of a server, as a collector for prometheus_client."""

    def __init__(self, model: str = "", *, vllm_names: bool = False) -> None:
        """Create all metrics. `model` is the model's name for clients. `vllm_names` additionally
        reports metrics under the names that vLLM uses."""
        self._model, self._vllm_names = model, vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self.success = Counter(
            "nanoactor_request_success",
            "Finished answers, by reason: stop, length, abort (the client has disconnected) or "
            "error.",
            ["finished_reason"],
            registry=self._registry,
        )
        for reason in FINISHED_REASONS:
            self.success.labels(reason)
        self.requests = Counter(
            "nanoactor_requests",
            "Answers, by path and outcome.",
            ["path", "outcome"],
            registry=self._registry,
        )
        self.broken_off = Counter(
            "nanoactor_streams_broken_off",
            "Streams that ended with an error after they had begun.",
            registry=self._registry,
        )
        self.turn_tokens = Counter(
            "nanoactor_turn_tokens",
            "Prompt tokens of a conversation's previous turn when the next turn arrived: reused "
            "from the prefix cache, or computed again.",
            ["fate"],
            registry=self._registry,
        )
        self._histograms: list[Histogram] = []
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival until the server's event loop received its first token.",
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a stream; tokens that arrive together share the time.",
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Time per output token of a request, after its first token.",
        )
        self.queue = self._histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival to its first step on the device.",
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds",
            "Time from a request's first step on the device to its first token.",
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from a request's first token to its last."
        )
        self.inference = self._histogram(
            "request_inference_time_seconds",
            "Time from a request's first step on the device to its last token.",
        )
        self.e2e = self._histogram("request_seconds", "Time from a request's arrival to its end.")
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of completed requests.", _TOKEN_BOUNDS
        )
        self.output_tokens = self._histogram(
            "request_output_tokens", "Output tokens of completed requests.", _TOKEN_BOUNDS
        )
        self.longest_answer_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "Tokens in the longest answer of completed requests.",
            _TOKEN_BOUNDS,
        )
        self.lag = self._histogram(
            "event_loop_lag_seconds",
            "Delay with which the server's event loop handled a timer.",
            _LAG_BOUNDS,
        )
        self.engine_metrics: Callable[[], Iterator[Metric]] = lambda: iter(())
        """Function that yields the latest known metrics of the engine."""
        self._registry.register(self)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float] = _LATENCY_BOUNDS
    ) -> Histogram:
        histogram = Histogram(f"nanoactor_{name}", text, bounds)
        self._histograms.append(histogram)
        return histogram

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Called by the registry."""
        info = InfoMetricFamily("nanoactor", "The served model and the version of nanoactor.")
        info.add_metric([], {"model_name": self._model, "version": nanoactor.__version__})
        yield info
        families = [histogram.family() for histogram in self._histograms]
        families += self.engine_metrics()
        yield from families
        if self._vllm_names:
            yield from with_vllm_names([*families, *self.success.collect()], self._model)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def record_pooling(self, times: RequestMetrics, prompt: int) -> None:
        """Record a finished embedding or score request. `prompt` is the number of its prompt
        tokens."""
        if times.first_scheduled_time is not None:
            self.queue.observe(times.first_scheduled_time - times.arrival_time)
        if times.finished_time is not None:
            self.e2e.observe(times.finished_time - times.arrival_time)
        self.prompt_tokens.observe(prompt)
        self.success.labels("stop").inc()
