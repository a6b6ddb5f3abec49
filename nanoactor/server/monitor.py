"""Monitor that polls the engine twice a second and keeps the results for `/metrics`, `/health` and
the web page. The rate does not depend on how often clients request these."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from nanoactor.actors.device_track import DEVICE
from nanoactor.actors.scheduler import LOAD
from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import EngineClosed, EngineDead
from nanoactor.server.errors import death_message
from nanoactor.server.health import Health, assess, dead, recovering
from nanoactor.server.metrics import Metrics

log = logging.getLogger("nanoactor.server")

INTERVAL, BINS, MAX_SNAPSHOTS = 0.5, 10, 60
"""Seconds between two snapshots, number of equal time intervals (bins) per snapshot, and number of
snapshots kept."""
_LAG_INTERVAL = 0.02
_HEALTH_LIMIT_FRACTION = 0.5
"""Fraction of the stall timeout after which `/health` reports a failure, so that load balancers
react before the stalled process is killed."""
_AVERAGED_SNAPSHOTS = 20
"""Number of snapshots over which busy and idle shares are averaged; together they cover ten
seconds."""
_IDLE_HELP = "Share of the time with pending work in which the device was idle, over ten seconds."
_AGE_HELP = "Age of each actor's latest step while there is work, otherwise 0."
_CACHED_HELP = "Prompt tokens that were looked up in the prefix cache."
_PREEMPTIONS_HELP = "Sequences that were preempted to free their blocks for older ones."
_UNCAPTURED_HELP = "Steps launched operator by operator because their size could not be captured."
_COUNTERS = (
    ("prefix_cache_prompt_tokens", _CACHED_HELP, "blocks", "prompt_tokens"),
    (
        "prefix_cache_hit_tokens",
        "Prompt tokens that were found in the prefix cache.",
        "blocks",
        "hit_tokens",
    ),
    ("prefill_tokens", "Prompt tokens computed.", "scheduler", "prefill_tokens"),
    ("decode_tokens", "Decode tokens computed.", "scheduler", "decode_tokens"),
    ("output_tokens", "Output tokens of all sequences.", "scheduler", "output_tokens"),
    ("steps", "Steps planned.", "scheduler", "steps"),
    ("preemptions", _PREEMPTIONS_HELP, "scheduler", "preemptions"),
    ("uncaptured_steps", _UNCAPTURED_HELP, "runner.0", "steps_uncaptured"),
    ("device_busy_seconds", "Time in which the device computed.", "runner.0", "busy_seconds"),
    ("load_seconds", "Time in which there was work to do.", "scheduler", "load_seconds"),
    (
        "images_encoded",
        "Images that the vision tower has encoded.",
        "scheduler",
        "items_encoded",
    ),
    (
        "encoder_cache_hits",
        "Images that were already in the encoder cache.",
        "blocks",
        "encoder_hits",
    ),
)
"""Counters: name, help text, actor, and the name of the actor's statistic."""
_VISION_COUNTERS = (
    ("images", "Images that came with requests.", "items"),
    ("images_decoded", "Images that were decoded because their pixels were needed.", "decoded"),
    ("image_decode_seconds", "Time in which vision workers decoded images.", "decode_seconds"),
)
"""Counters summed over all vision workers: name, help text, and name of the statistic."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the engine at one point in time."""

    number: int
    tracks: dict[str, list[int]]
    """For each actor or device: the percentage of time that it was busy, in each of the `BINS`
    intervals before the snapshot."""
    dead_actors: list[str]
    """Actors whose process has died since the previous snapshot, or is being replaced."""
    busy_seconds: float
    """Total time for which the device has been busy, in seconds."""
    load_seconds: float
    """Total time for which there has been work, in seconds."""
    steps: int
    """Number of steps that the device has completed."""
    figures: dict[str, float]
    """Statistics of the waiting queue, the sequences and the KV cache."""


class Monitor:
    """Keeps the latest snapshots of one engine, and measures the delay of the event loop's
    timers."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics, stall_timeout: float | None) -> None:
        """Create the monitor. `stall_timeout` is the engine's, in seconds. `/health` reports a
        stall after half of that time, or never if it is None."""
        self._llm = llm
        self._metrics = metrics
        self._limit = math.inf if stall_timeout is None else _HEALTH_LIMIT_FRACTION * stall_timeout
        self._snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self._figures: dict[str, dict[str, Any]] = {}
        self._heard_at: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        """Name of each actor's process, by actor."""
        self._restarts_before: Mapping[str, int] = {}
        self._activity_end = time.monotonic_ns()
        self._number = 0
        self._dead = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._was_ok = True
        metrics.engine_metrics = self.collect

    async def start(self) -> None:
        """Take the first snapshot, and start the tasks that take the later ones."""
        await self._take_snapshot()
        self._tasks = [
            asyncio.ensure_future(self._snapshot_loop()),
            asyncio.ensure_future(self._measure_lag()),
        ]

    async def stop(self) -> None:
        """Cancel the tasks, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _snapshot_loop(self) -> None:
        while not self._dead:
            await asyncio.sleep(INTERVAL)
            try:
                await self._take_snapshot()
                self._log_health()
            except (EngineDead, EngineClosed) as error:
                self._dead = str(error)
                log.critical("%s", error)
                self._log_health()
            except Exception:  # errors in statistics must not end the monitoring
                log.exception("the engine's health could not be read")

    def _log_health(self) -> None:
        """Log every change of the engine's health."""
        health = self.health()
        if health.is_ok != self._was_ok:
            self._was_ok = health.is_ok
            if health.is_ok:
                log.warning("the engine is healthy again")
            else:
                log.error("the engine is %s: %s", health.status, health.culprit)

    async def _measure_lag(self) -> None:
        """Measure, until canceled, how late the event loop wakes a sleeping task."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._metrics.lag.observe(max(0.0, time.monotonic() - due))

    # -- snapshots ------------------------------------------------------------------------

    async def _take_snapshot(self) -> None:
        begin, now = self._activity_end, time.monotonic_ns()
        width = max(1, (now - begin) // BINS)
        figures, tracks = await asyncio.gather(
            self._llm.statistics(), self._llm.activity(begin, width, BINS)
        )
        received_at = time.monotonic_ns()
        for name, actor_statistics in figures.items():
            self._figures[name] = actor_statistics["actor"]
            self._heard_at[name] = received_at
            self._nodes[name] = actor_statistics["node"]["name"]
        self._activity_end = begin + width * BINS
        self._number += 1
        shares = {
            name: [round(100 * share) for share in track.tolist()]
            for name, track in tracks.items()
            if not name.endswith(f" {LOAD}")
        }
        self._snapshots.append(self._make_snapshot(shares))

    def _make_snapshot(self, tracks: dict[str, list[int]]) -> Snapshot:
        scheduler, frontend = self._actor_figures("scheduler"), self._actor_figures("frontend")
        blocks = scheduler.get("blocks", 0)
        figures = {
            "waiting_requests": frontend.get("waiting_requests", 0),
            "waiting_tokens": frontend.get("waiting_tokens", 0),
            "waiting_media_bytes": frontend.get("waiting_media_bytes", 0),
            "running": scheduler.get("running", 0),
            "blocks": blocks,
            "blocks_used": blocks - self._actor_figures("blocks").get("available", blocks),
            "output_tokens": scheduler.get("output_tokens", 0),
            "hit_ratio": self._actor_figures("blocks").get("hit_ratio", 0.0),
        }
        runner = self._actor_figures("runner.0")
        busy, steps = runner.get("busy_seconds", 0.0), runner.get("steps_done", 0)
        load = scheduler.get("load_seconds", 0.0)
        return Snapshot(
            self._number,
            tracks,
            dead_actors=self._dead_actors(),
            busy_seconds=busy,
            load_seconds=load,
            steps=steps,
            figures=figures,
        )

    def _dead_actors(self) -> list[str]:
        recovery, (restarts, _) = self._llm.recovering, self._llm.restarts
        dead_nodes = set(recovery[0].split(", ")) if recovery else set()
        previous, self._restarts_before = self._restarts_before, restarts
        dead_nodes |= {node for node, count in restarts.items() if count > previous.get(node, 0)}
        return [actor for actor, node in self._nodes.items() if node in dead_nodes]

    def _actor_figures(self, actor: str) -> dict[str, Any]:
        return self._figures.get(actor, {})

    def _window(self, snapshots: int) -> tuple[Snapshot, Snapshot]:
        """Return a pair of snapshots: the one taken `snapshots` before the latest (or the oldest
        that is kept), and the latest."""
        return self._snapshots[max(0, len(self._snapshots) - 1 - snapshots)], self._snapshots[-1]

    def _idle_share(self, snapshots: int) -> float:
        """Return the share of time in which the device was idle although there was work, from 0 to
        1, over the last `snapshots` snapshots."""
        first, last = self._window(snapshots)
        load = last.load_seconds - first.load_seconds
        busy = last.busy_seconds - first.busy_seconds
        return min(1.0, max(0.0, 1 - busy / load)) if load > 0 else 0.0

    def _step_seconds(self, snapshots: int) -> float:
        """Return the mean duration of a step in seconds, over the last `snapshots` snapshots."""
        first, last = self._window(snapshots)
        steps = last.steps - first.steps
        return (last.busy_seconds - first.busy_seconds) / steps if steps else 0.0

    def _busy_shares(self, snapshots: int) -> dict[str, float]:
        """Return the share of time in which each actor and device was busy, from 0 to 1, over the
        last `snapshots` snapshots."""
        averaged = list(self._snapshots)[-snapshots:]
        total = 100 * BINS * len(averaged)
        return {
            name: sum(sum(snapshot.tracks.get(name, [0])) for snapshot in averaged) / total
            for name in averaged[-1].tracks
        }

    # -- reporting ------------------------------------------------------------------------

    def health(self) -> Health:
        """Return the current health of the engine."""
        if (error := self._llm.dead) is not None:
            return dead(death_message(error))
        if (recovery := self._llm.recovering) is not None:
            return recovering(recovery[0], time.monotonic() - recovery[1])
        now = time.monotonic_ns()
        return assess(self._figures, self._heard_at, now, self._limit)

    def _restart_metrics(self) -> Iterator[Metric]:
        counts, seconds = self._llm.restarts
        name = "nanoactor_process_restarts"
        family = CounterMetricFamily(
            name, "Processes that died and were replaced.", labels=["node"]
        )
        for node in self._llm.pids:
            family.add_metric([node], counts.get(node, 0))
        yield family
        text = "Time in which requests waited for processes to be replaced."
        yield CounterMetricFamily("nanoactor_restart_seconds", text, value=seconds)

    def samples_since(self, number: int) -> dict[str, Any]:
        """Return the data of all snapshots after the one with this number, in the form that the web
        page reads."""
        new = [snapshot for snapshot in self._snapshots if snapshot.number > number]
        before, last = self._window(1)
        return {
            "number": last.number,
            "interval": INTERVAL,
            "bins": BINS,
            "device": f"runner.0 {DEVICE}",
            "tracks": [snapshot.tracks for snapshot in new],
            "gone": [snapshot.dead_actors for snapshot in new],
            "recovering": recovery[0] if (recovery := self._llm.recovering) else "",
            "tokens": [snapshot.figures["output_tokens"] for snapshot in new],
            "idle": self._idle_share(4),
            "loaded": last.load_seconds > before.load_seconds,
            **last.figures,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine, for Prometheus."""
        if not self._snapshots:
            return
        last = self._snapshots[-1]
        figures = last.figures
        used = figures["blocks_used"] / max(1, figures["blocks"])
        is_dead = self._llm.dead is not None
        up = float(not is_dead)
        yield GaugeMetricFamily("nanoactor_up", "Whether the engine is alive.", value=up)
        if is_dead:
            return
        for name, text, value in (
            (
                "queue_requests",
                "Requests that have no first token yet.",
                figures["waiting_requests"],
            ),
            (
                "queue_tokens",
                "Prompt tokens of requests that have no first token yet.",
                figures["waiting_tokens"],
            ),
            (
                "queue_media_bytes",
                "Image bytes of requests that have no first token yet.",
                figures["waiting_media_bytes"],
            ),
            ("running_sequences", "Sequences that have a slot.", figures["running"]),
            ("kv_blocks", "Blocks in the KV cache.", figures["blocks"]),
            ("kv_blocks_used", "Blocks that sequences hold.", figures["blocks_used"]),
            ("kv_use_ratio", "Share of the KV cache that sequences hold.", used),
            (
                "prefix_cache_hit_ratio",
                "Share of prompt tokens found in the prefix cache since the start.",
                figures["hit_ratio"],
            ),
            ("device_idle_ratio", _IDLE_HELP, self._idle_share(_AVERAGED_SNAPSHOTS)),
            (
                "step_seconds",
                "Mean duration of a step over ten seconds.",
                self._step_seconds(_AVERAGED_SNAPSHOTS),
            ),
        ):
            yield GaugeMetricFamily(f"nanoactor_{name}", text, value=value)
        for name, text, actor, key in _COUNTERS:
            count = self._actor_figures(actor).get(key, 0)
            yield CounterMetricFamily(f"nanoactor_{name}", text, value=count)
        yield from self._restart_metrics()
        workers = [f"vision.{number}" for number in range(self._llm.config.num_vision_workers)]
        for name, text, key in _VISION_COUNTERS:
            count = sum(self._actor_figures(worker).get(key, 0) for worker in workers)
            yield CounterMetricFamily(f"nanoactor_{name}", text, value=count)
        ages = {
            name: ages_of_actor["step_age"] or 0.0
            for name, ages_of_actor in self.health().actors.items()
        }
        for name, text, values in (
            (
                "busy_ratio",
                "Share of the time that each actor was busy, over ten seconds.",
                self._busy_shares(_AVERAGED_SNAPSHOTS),
            ),
            ("step_age_seconds", _AGE_HELP, ages),
        ):
            family = GaugeMetricFamily(f"nanoactor_actor_{name}", text, labels=["actor"])
            for actor, value in values.items():
                family.add_metric([actor], value)
            yield family
