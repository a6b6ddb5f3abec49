"""Which steps are planned ahead, and what holds the next one up."""

from types import SimpleNamespace

import numpy as np
import pytest

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import StepDone
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.sequences.table import ScheduledPositions
from nanoactor.scheduling.steps.pipeline import Pipeline
from nanoactor.scheduling.steps.planned import PlannedStep

NONE = np.empty(0, np.int32)
RUNNING = SimpleNamespace(sequences_in=lambda planned: [], stepwise=[])


def pipeline(**changes):
    config = SchedulerConfig(9, 4, 2, 8, 64, **changes)
    budget = BlockBudget(config.blocks, config.max_num_seqs)
    return Pipeline(config, budget, RUNNING), budget


def planned(step, *slots):
    """A step in which these slots decode."""
    batch = ScheduledPositions(4).batch_of(np.array(slots, np.int64))
    return PlannedStep(step, batch, [])


def done(step, tokens=0):
    return StepDone(step, NONE, np.zeros(tokens, np.int32), 0.0, 1)


def test_as_many_steps_are_planned_as_may_be_in_flight():
    ahead, _ = pipeline(depth=2)
    for step in (1, 2):
        assert ahead.may_plan()
        ahead.add(planned(step))
    assert not ahead.may_plan()
    ahead.complete(done(1))
    assert (ahead.completed, ahead.planned) == (1, 2)
    assert ahead.may_plan()
    ahead.depth.pause(True)
    assert not ahead.may_plan()


def test_no_step_is_planned_while_freed_blocks_are_not_reported():
    ahead, budget = pipeline(depth=2)
    budget.expect(turn=1, fence=0)
    for step in (1, 2):
        assert ahead.may_plan()
        ahead.add(planned(step))
        ahead.complete(done(step))
    assert not ahead.may_plan()
    budget.answer(1, [(0, 3)])
    assert ahead.may_plan()


def test_a_late_plan_waits_until_it_is_wanted():
    ahead, _ = pipeline(depth=2, plan_lead="late")
    assert ahead.may_plan()
    ahead.add(planned(1))
    assert not ahead.may_plan()
    assert not ahead.may_wait
    ahead.request(2)
    assert ahead.may_plan()


def test_it_is_known_which_step_in_flight_holds_a_slot_last():
    ahead, _ = pipeline(depth=3)
    for step, slots in ((1, (0, 1)), (2, (0,)), (3, ())):
        ahead.add(planned(step, *slots))
    assert [ahead.last_step_with(slot) for slot in range(3)] == [2, 1, 0]


def test_a_step_that_is_not_due_is_refused():
    ahead, _ = pipeline()
    with pytest.raises(ProtocolBug, match="none was due"):
        ahead.complete(done(1))
    ahead.add(planned(1, 0))
    with pytest.raises(ProtocolBug, match="step 1 was due with 1 of"):
        ahead.complete(done(2, tokens=1))
