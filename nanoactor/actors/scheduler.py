"""The scheduler's shell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor import messages as m
from nanoactor.config import EngineConfig
from nanoactor.runtime.actor import Actor, Context, Facts, Handler
from nanoactor.scheduling.scheduler import Scheduler, SchedulerConfig


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerActorConfig:
    """The engine's options and the length limit; sizes of the cache come from the runners."""

    engine: EngineConfig
    max_model_len: int


class SchedulerActor(Actor):
    """Events to the logic, messages to their edges."""

    def __init__(self, config: SchedulerActorConfig) -> None:
        self._config = config

    def start(self, context: Context, facts: Mapping[str, Facts]) -> None:
        """Make the scheduler, now that the runners have sized the cache."""
        super().start(context, facts)
        engine, cache = self._config.engine, facts["runner.0"]
        self._scheduler = Scheduler(
            SchedulerConfig(
                cache["num_blocks"],
                cache["block_size"],
                engine.max_num_seqs,
                engine.max_num_batched_tokens,
                self._config.max_model_len,
                engine.pipeline_depth,
                engine.plan_lead,
                engine.enable_prefix_caching,
                engine.priority_window,
            )
        )

    def handlers(self) -> Mapping[type, Handler]:
        """Everything goes to the logic."""
        events = (m.Admit, m.Reject, m.Abort, m.Stop, m.Credits, m.StepDone, m.StepWanted)
        return dict.fromkeys(events, self._handle)

    def _handle(self, event: Any) -> None:
        for edge, message in self._scheduler.handle(event):
            self.context.outbox(edge).send(message)

    def statistics(self) -> dict[str, Any]:
        """Counts of steps, tokens, preemptions and ends; what waits, runs and is held now."""
        scheduler = self._scheduler
        scheduler.check_idle()
        return {
            **dataclasses.asdict(scheduler.statistics),
            "waiting": scheduler.waiting,
            "running": scheduler.running,
            "live": len(scheduler.live),
            "tombstones": scheduler.tombstones,
            "credits": scheduler.credits,
            "blocks": scheduler.config.blocks,
        }
