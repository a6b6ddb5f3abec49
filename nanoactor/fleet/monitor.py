"""Health, metrics and live data of a fleet, for `/health`, `/metrics` and the web page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from nanoactor.fleet.client import FleetLLM
from nanoactor.fleet.replica import Replica
from nanoactor.server.health import Health

INTERVAL, BINS, MAX_SAMPLES = 0.5, 10, 60
_SILENCE_SECONDS = 3.0
"""Time without a report after which `/health` lists a replica as a problem, in seconds. Replicas
report at least once a second."""
_COUNTERS = (
    ("moved", "Streams that continued on another replica."),
    ("requeued", "Requests without a first token that were sent to another replica."),
    ("lost", "Streams that could not continue."),
    ("deaths", "Replicas that died or hung."),
    ("poisoned", "Requests that were found to kill replicas."),
)
_REPLICA_GAUGES = (
    ("streams", "Streams of all ingresses on a replica."),
    ("waiting", "Requests without a first token on a replica."),
    ("free_blocks", "Blocks of a replica's KV cache that no sequence holds."),
    ("known_blocks", "Blocks of a replica's prefix index that this ingress knows."),
    ("silent_seconds", "Seconds since a replica last reported."),
    ("reserved", "Whether a replica is reserved for a suspect."),
)
_REPLICA_COUNTERS = (
    ("output_tokens", "Output tokens of a replica's sequences."),
    ("prefill_tokens", "Prompt tokens that a replica computed."),
    ("prompt_tokens", "Prompt tokens that a replica looked up in its prefix cache."),
    ("hit_tokens", "Prompt tokens that a replica found in its prefix cache."),
    ("device_busy_seconds", "Seconds for which a replica's device computed."),
    ("preemptions", "Sequences that were preempted to free their blocks for older sequences."),
)


class FleetMonitor:
    """Monitor of a fleet. It evaluates the replicas' reports, and sends no requests to them."""

    def __init__(self, llm: FleetLLM) -> None:
        self._llm = llm
        self._samples: deque[dict[str, list[int]]] = deque(maxlen=MAX_SAMPLES)
        self._tokens: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._number = 0
        self._busy: dict[str, tuple[float, float, int]] = {}
        """For each replica: busy time of its device in seconds, the time at which that figure last
        changed (`time.monotonic()`), and the utilization before that time, in percent."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start sampling in the background."""
        self._sample()
        self._task = asyncio.ensure_future(self._sample_loop())

    async def stop(self) -> None:
        """Stop sampling, and wait until the task has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sample_loop(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self._sample()

    def _sample(self) -> None:
        self._number += 1
        self._samples.append(
            {name: [self._utilization(r)] * BINS for name, r in self._replicas.items()}
        )
        self._tokens.append(self._sum("output_tokens"))

    @property
    def _replicas(self) -> dict[str, Replica]:
        return self._llm.fleet.replicas

    def _utilization(self, replica: Replica) -> int:
        """Return the recent utilization of a replica's device, in percent."""
        busy, now = replica.figures.get("device_busy_seconds", 0.0), time.monotonic()
        previous, at, percent = self._busy.get(replica.name, (busy, now, 0))
        if busy != previous or now - at > 4 * INTERVAL:
            percent = round(100 * min(1.0, (busy - previous) / max(now - at, 1e-3)))
            previous, at = busy, now
        self._busy = {name: one for name, one in self._busy.items() if name in self._replicas}
        self._busy[replica.name] = previous, at, percent
        return percent

    def _sum(self, name: str) -> float:
        return sum(replica.figures.get(name, 0.0) for replica in self._replicas.values())

    # -- reporting --------------------------------------------------------------------------

    def health(self) -> Health:
        """Return the health of the fleet, with an entry for each replica. The status is "ok" if at
        least one replica serves."""
        now, fleet = time.monotonic(), self._llm.fleet
        actors: dict[str, dict[str, float | None]] = {}
        bad = []
        serving = 0
        for name, replica in self._replicas.items():
            silent = now - replica.last_report
            actors[name] = {
                "step_age": None,
                "silent": silent,
                "streams": replica.state.streams,
                "pid": replica.state.hello.facts.get("pid"),
            }
            if silent > _SILENCE_SECONDS or replica.link.is_leaving:
                bad.append(name)
            else:
                serving += 1
        missing = sorted(fleet.links.unconnected)
        status = "ok" if serving else "recovering"
        culprit = ", ".join(missing + bad)
        pending = bool(fleet.requests)
        return Health(status, culprit, pending, None, actors)

    def samples_since(self, number: int) -> dict[str, Any]:
        """Return the samples after the one with this number, at most `MAX_SAMPLES`, and the current
        totals, in the form that the web page reads."""
        new = min(len(self._samples), max(0, self._number - number))
        states = [replica.state for replica in self._replicas.values()]
        prompt_tokens, hits = self._sum("prompt_tokens"), self._sum("hit_tokens")
        blocks = sum(state.hello.facts["num_blocks"] for state in states)
        busy = [sample[0] for sample in self._samples[-1].values()] if self._samples else []
        return {
            "number": self._number,
            "interval": INTERVAL,
            "bins": BINS,
            "device": "",
            "tracks": list(self._samples)[len(self._samples) - new :],
            "gone": [[] for _ in range(new)],
            "recovering": "" if self.health().is_ok else "no replica is serving",
            "tokens": list(self._tokens)[len(self._tokens) - new :],
            "idle": 1 - sum(busy) / (100 * max(1, len(busy))),
            "loaded": bool(self._llm.fleet.requests),
            "waiting_requests": sum(state.load.waiting for state in states),
            "waiting_tokens": sum(state.load.waiting_tokens for state in states),
            "waiting_media_bytes": 0,
            "running": sum(state.load.running for state in states),
            "blocks": blocks,
            "blocks_used": blocks - sum(state.load.free_blocks for state in states),
            "output_tokens": self._sum("output_tokens"),
            "hit_ratio": hits / max(1.0, prompt_tokens),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the fleet and its replicas, for Prometheus."""
        fleet, now = self._llm.fleet, time.monotonic()
        up = float(self.health().is_ok)
        yield GaugeMetricFamily("nanoactor_up", "Whether a replica is serving.", value=up)
        text = "Replicas that are serving."
        yield GaugeMetricFamily("nanoactor_replicas", text, value=float(len(fleet.replicas)))
        waiting = float(fleet.queue.waiting)
        text = "Requests of this ingress that are waiting for a replica."
        yield GaugeMetricFamily("nanoactor_ingress_waiting", text, value=waiting)
        for name, text in _COUNTERS:
            value = float(getattr(fleet.counts, name))
            yield CounterMetricFamily(f"nanoactor_fleet_{name}", text, value=value)
        for name, text in _REPLICA_GAUGES:
            gauge = GaugeMetricFamily(f"nanoactor_replica_{name}", text, labels=["replica"])
            for replica in fleet.replicas.values():
                gauge.add_metric([replica.name], self._gauge(name, replica, now))
            yield gauge
        for name, text in _REPLICA_COUNTERS:
            counter = CounterMetricFamily(f"nanoactor_{name}", text, labels=["replica"])
            for replica in fleet.replicas.values():
                counter.add_metric([replica.name], replica.figures.get(name, 0.0))
            yield counter

    def _gauge(self, name: str, replica: Replica, now: float) -> float:
        load = replica.state.load
        return float(
            {
                "streams": replica.state.streams,
                "waiting": load.waiting,
                "free_blocks": load.free_blocks,
                "known_blocks": self._llm.fleet.router.prefixes.known_blocks(replica.name),
                "silent_seconds": now - replica.last_report,
                "reserved": load.is_reserved,
            }[name]
        )
