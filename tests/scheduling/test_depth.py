import dataclasses
from dataclasses import dataclass

import pytest

from nanoactor.messages.engine import Turn
from nanoactor.scheduling.steps.depth import PipelineDepth
from tests.scheduling.events import admit, answered, done, of_kind, scheduler


@dataclass
class Step:
    is_decode_step: bool = True


DECODES, OTHER = Step(), Step(is_decode_step=False)


def depth(pipeline, *, stepwise=False):
    """How many steps that decode may be in flight."""
    steps = 0
    while pipeline.has_room([DECODES] * steps, stepwise=stepwise):
        steps += 1
    return steps


def taking(milliseconds, least=2, most=4):
    pipeline = PipelineDepth(least, most)
    for _ in range(64):
        pipeline.note_step(DECODES, milliseconds * 1e-3)
    return pipeline


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.1, 4), (0.6, 4), (0.7, 3), (0.9, 3), (1.1, 2), (5.0, 2), (500.0, 2)],
)
def test_short_steps_are_planned_further_ahead(milliseconds, expected):
    assert depth(taking(milliseconds)) == expected


@pytest.mark.parametrize(
    ("milliseconds", "expected"), [(0.1, 4), (1.2, 4), (1.3, 3), (2.4, 3), (2.6, 2), (5.0, 2)]
)
def test_they_are_planned_further_ahead_beside_sequences_that_never_decode(milliseconds, expected):
    assert depth(taking(milliseconds), stepwise=True) == expected


@pytest.mark.parametrize("stepwise", [False, True])
def test_before_any_step_is_done_they_count_as_long(stepwise):
    assert depth(PipelineDepth(2, 4), stepwise=stepwise) == 2


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("stepwise", [False, True])
def test_with_no_more_than_the_least_nothing_depends_on_time(least, stepwise):
    for milliseconds in (0.01, 100):
        assert depth(taking(milliseconds, least, least), stepwise=stepwise) == least


@pytest.mark.parametrize("stepwise", [False, True])
def test_nothing_more_is_planned_behind_prompts_or_where_nobody_decodes(stepwise):
    pipeline = taking(0.1)
    assert pipeline.has_room([OTHER], stepwise=stepwise)
    assert not pipeline.has_room([DECODES, OTHER], stepwise=stepwise)
    assert not pipeline.has_room([OTHER, DECODES], stepwise=stepwise)
    assert pipeline.has_room([DECODES, DECODES], stepwise=stepwise)


def test_other_steps_say_nothing_about_those_that_decode():
    pipeline = taking(0.1)
    for _ in range(64):
        pipeline.note_step(OTHER, 1.0)
    assert depth(pipeline) == 4


def test_it_follows_steps_that_grow():
    pipeline = taking(0.1)
    pipeline.note_step(DECODES, 0.002)
    assert depth(pipeline) == 4  # a step may be late once
    for _ in range(16):
        pipeline.note_step(DECODES, 0.002)
    assert depth(pipeline) == 2


@pytest.mark.parametrize(
    ("grammars", "expected"),
    [
        pytest.param(["", ""], 2, id="two that decode"),
        pytest.param(["", "{}"], 3, id="one decodes, one waits for its mask"),
    ],
)
def test_a_step_more_is_planned_where_a_constrained_sequence_runs_beside_others(grammars, expected):
    logic = scheduler(max_depth=4)
    turns, free, told = [], grammars.count(""), 0

    def heard(event):
        turns.extend(of_kind(logic.handle(event), Turn))
        return [turn.plan for turn in turns if turn.plan]

    for uid, grammar in enumerate(grammars):
        heard(admit([1, 2, 3], 1, uid, grammar=grammar))
    uids = [one.uid for turn in turns for one in turn.admissions]
    plans = heard(answered(turns[-1], uids))
    while told < min(len(plans), 12):
        counts = logic._pipeline.in_flight[0].counts.tolist()
        tokens = [1] * logic._pipeline.in_flight[0].num_sampled
        message = dataclasses.replace(done(plans[told], tokens, counts))
        plans = heard(dataclasses.replace(message, seconds=0.0018))
        told += 1
    assert free
    assert len(plans) - told == expected
