"""The scheduler's actor, which passes messages to the scheduling logic and sends those that
result."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nanoactor.messages import engine as messages
from nanoactor.messages.grammar import MaskClock
from nanoactor.messages.orders import Pause
from nanoactor.runtime.actor import Actor, Context, Handler, Progress, ReadyInfo
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.rehearsal import Rehearsal
from nanoactor.scheduling.scheduler import Scheduler
from nanoactor.setup.actors import ActorConfig, RunnerReady, encoder_limits

# Number of event loop iterations from the planning of a step to the sending of it.
_HOPS = 4
LOAD, ENTERS, LEAVES, ENCODES = "load", "enters", "leaves", "encodes"
"""Name of the trace track that shows when requests are live, and names of its spans: requests that
enter, requests that leave, and images that are encoded. The field `sent` of these spans is the
step's number."""


class SchedulerActor(Actor):
    """Actor that passes events (received messages) to the `Scheduler`, and sends the resulting
    messages to the other actors."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Create a new scheduler for the KV cache that the runners have allocated."""
        super().start(context, ready)
        self._load_track = context.new_track(LOAD)
        self._busy_kind = self._load_track.kind("requests")
        self._enter_kind = self._load_track.kind(ENTERS, "uid")
        self._leave_kind = self._load_track.kind(LEAVES, "uid")
        self._encode_kind = self._load_track.kind(ENCODES, "pixels")
        self._busy_since = 0
        self._live_since = self._load_ns = self._step_at = self._tokens_at = 0
        self._mask_clock_runs = False
        """True if a `MaskClock` timer is running, which detects masks that are overdue."""
        self._hold_clock_runs = False
        """True if a `HoldClock` timer is running, which detects callers that do not resume their
        paused sequences."""
        self._scheduler = Scheduler(_scheduler_config(self._config, RunnerReady.find(ready)))
        self._block_size = RunnerReady.find(ready).block_size

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of all events; every event is passed to the scheduler."""
        return dict.fromkeys(Scheduler.EVENTS, self._handle)

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span names of the events that matter most for latency."""
        return {
            messages.StepDone: "schedule",
            messages.StepWanted: "schedule early",
            messages.Admit: "admit",
        }

    def _handle(self, event: Any) -> None:
        if type(event) is messages.StepDone:
            self._step_at = time.monotonic_ns()
        elif type(event) is MaskClock:
            self._mask_clock_runs = False
        elif type(event) is messages.HoldClock:
            self._hold_clock_runs = False
        elif type(event) is Pause and self._live_since:
            self._live_since = time.monotonic_ns()  # nothing can be late during a pause
        for edge, message in self._scheduler.handle(event):
            self._link_requests(message)
            self.context.outbox(edge).send(message)
        if self._scheduler.constraints.is_waiting and not self._mask_clock_runs:
            self._mask_clock_runs = True
            self.context.send_self_later(self._config.engine.mask_timeout / 2, MaskClock())
        if self._scheduler.held_sequences and not self._hold_clock_runs:
            self._hold_clock_runs = True
            self.context.send_self_later(self._config.engine.hold_timeout / 2, messages.HoldClock())
        self._note_load()

    def _link_requests(self, message: Any) -> None:
        """Record in the trace the steps in which requests enter or leave and images are
        encoded."""
        if isinstance(message, messages.Turn):
            if (plan := message.plan) is not None:
                for uid in plan.admissions.uids.tolist():
                    self._link(self._enter_kind, uid, plan.step)
                for number in plan.slices.pixels.tolist() if plan.slices else ():
                    self._link(self._encode_kind, number, plan.step)
        elif isinstance(message, messages.Tokens):
            self._tokens_at = time.monotonic_ns()
            for finish in message.finishes:
                self._link(self._leave_kind, finish.uid, message.step)

    def _link(self, kind: int, uid: int, step: int) -> None:
        now = time.monotonic_ns()
        self._load_track.add(kind, uid, now, now, step)

    def _note_load(self) -> None:
        """Record the periods in which there was work, because only then does a device's idle time
        count."""
        if self._scheduler.live and not self._busy_since:
            self._busy_since = self._live_since = time.monotonic_ns()
        elif self._busy_since and not self._scheduler.live:
            self._add_load(time.monotonic_ns())
            self._busy_since = self._live_since = 0

    def _add_load(self, now: int) -> None:
        self._load_track.add(self._busy_kind, 0, self._busy_since, now)
        self._load_ns += now - self._busy_since

    def before_trace(self) -> None:
        """Record the current period of work up to now, if there is one."""
        if self._busy_since:
            now = time.monotonic_ns()
            self._add_load(now)
            self._busy_since = now

    def progress(self) -> Progress | None:
        """Return (number of planned steps, 0.0) if live sequences wait although nothing is in
        flight, so that the watchdog notices a stalled scheduler; otherwise None."""
        scheduler = self._scheduler
        return (scheduler.statistics.steps, 0.0) if scheduler.is_stalled else None

    def rehearse(self) -> Iterator[object]:
        """Process a dummy request in a copy of the scheduler and the block manager, to warm up the
        CPU caches. Begins only after the next step has been planned, because before then too little
        time is left."""
        before = self._scheduler.statistics.steps
        while self._scheduler.statistics.steps == before:
            yield None
        yield from (None,) * _HOPS
        yield from self._rehearsal.run()

    @functools.cached_property
    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(self._block_size)

    def statistics(self) -> dict[str, Any]:
        """Return the scheduler's figures, and the total time in which there was work, in seconds
        (`load_seconds`).

        `live_since` is the start of the current period of work, `step_at` is the arrival of the
        latest result, and `tokens_at` is when tokens were last sent to the detokenizer. All three
        are in ns of the monotonic clock.
        """
        scheduler = self._scheduler
        scheduler.check_idle()
        self.before_trace()
        return {
            **scheduler.figures(),
            "load_seconds": self._load_ns * 1e-9,
            "step_at": self._step_at,
            "live_since": self._live_since,
            "tokens_at": self._tokens_at,
        }


def _scheduler_config(config: ActorConfig, cache: RunnerReady) -> SchedulerConfig:
    """Return the scheduler's configuration for the KV cache that the runners have allocated."""
    engine = config.engine
    return SchedulerConfig(
        blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=config.files.fit_to_cache(cache.capacity_tokens).max_model_len,
        depth=engine.pipeline_depth,
        max_depth=cache.max_depth,
        plan_lead=engine.plan_lead,
        prefix_caching=engine.enable_prefix_caching and not config.files.has_slot_state,
        priority_window=engine.priority_window,
        encoder=encoder_limits(config, cache),
        ranks=engine.tensor_parallel_size,
        jump_forward=engine.jump_forward,
        pooling=config.files.pooling.kind if config.files.pooling else "",
    )
