"""The pipeline of steps that are planned ahead of the device."""

from __future__ import annotations

from collections import deque

from nanoactor.messages.engine import StepDone
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.steps.depth import PipelineDepth
from nanoactor.scheduling.steps.planned import PlannedStep
from nanoactor.scheduling.steps.queues import RunningBatch
from nanoactor.scheduling.steps.results import check_due


class Pipeline:
    """The steps in flight: those that are planned and whose results have not been processed.
    Decides whether the scheduler may plan another step."""

    def __init__(self, config: SchedulerConfig, budget: BlockBudget, running: RunningBatch) -> None:
        """`budget` tells whether freed blocks are still to be reported. `running` contains the
        sequences for which steps are planned."""
        self._budget, self._running, self._min_depth = budget, running, config.depth
        self._is_eager = config.plan_lead == "eager"
        self.depth = PipelineDepth(config.depth, config.max_depth)
        self.in_flight: deque[PlannedStep] = deque()
        self.planned = self.completed = self._requested = 0
        """Step numbers: the last one planned, the last one completed, and the last one requested by
        the runner."""

    def may_plan(self) -> bool:
        """Return True if another step may be planned now."""
        if not self.depth.has_room(self.in_flight, stepwise=bool(self._running.stepwise)):
            return False
        # The number of freed blocks must be known within `depth` steps, however slow the block
        # manager is.
        unanswered = self._budget.oldest_unanswered
        if unanswered is not None and self.planned >= unanswered + self._min_depth:
            return False
        at_once = self._is_eager or not self.in_flight
        return at_once or self._requested > self.planned

    def request(self, step: int) -> None:
        """Record that the runner has requested the plan of step `step`."""
        self._requested = max(self._requested, step)

    def add(self, planned: PlannedStep) -> None:
        """Add the step that has just been planned."""
        self.planned = planned.step
        self.in_flight.append(planned)

    def complete(self, event: StepDone) -> PlannedStep:
        """Remove the oldest step in flight, whose results have arrived, and return it. Raises
        `ProtocolBug` if `event` does not match that step."""
        due = self.in_flight.popleft() if self.in_flight else None
        planned = check_due(due, event, self._running)
        planned.note_begin(event.began)
        self.depth.note_step(planned, event.seconds)
        self.completed = event.step
        return planned

    def last_step_with(self, slot: int) -> int:
        """Return the number of the last step in flight that contains the sequence in a slot; 0 if
        there is none."""
        return max((p.step for p in self.in_flight if p.has_row(slot)), default=0)

    @property
    def may_wait(self) -> bool:
        """True if news for the block manager may wait until the next step is planned, because a
        step is in flight. With late planning, the block manager should have recorded all known
        tokens before the next plan."""
        return self._is_eager and bool(self.in_flight)
