from dataclasses import dataclass

import pytest

from nanoactor.scheduling.depth import PipelineDepth


@dataclass
class Step:
    only_decodes: bool = True


DECODES, PROMPTS = Step(), Step(only_decodes=False)


def depth(pipeline):
    """How many steps that decode may be in flight."""
    steps = 0
    while pipeline.has_room([DECODES] * steps):
        steps += 1
    return steps


def taking(milliseconds, least=2, most=4):
    pipeline = PipelineDepth(least, most)
    for _ in range(64):
        pipeline.note(DECODES, milliseconds * 1e-3)
    return pipeline


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.1, 4), (0.6, 4), (0.7, 3), (0.9, 3), (1.1, 2), (5.0, 2), (500.0, 2)],
)
def test_short_steps_are_planned_further_ahead(milliseconds, expected):
    assert depth(taking(milliseconds)) == expected


def test_before_any_step_is_done_they_count_as_long():
    assert depth(PipelineDepth(2, 4)) == 2


@pytest.mark.parametrize("least", [1, 2, 3])
def test_with_no_more_than_the_least_nothing_depends_on_time(least):
    assert depth(taking(0.01, least, least)) == depth(taking(100, least, least)) == least


def test_nothing_more_is_planned_behind_a_prompt():
    pipeline = taking(0.1)
    assert pipeline.has_room([PROMPTS])
    assert not pipeline.has_room([DECODES, PROMPTS])
    assert not pipeline.has_room([PROMPTS, DECODES])
    assert pipeline.has_room([DECODES, DECODES])


def test_a_step_with_prompts_says_nothing_about_those_that_decode():
    pipeline = taking(0.1)
    for _ in range(64):
        pipeline.note(PROMPTS, 1.0)
    assert depth(pipeline) == 4


def test_it_follows_steps_that_grow():
    pipeline = taking(0.1)
    pipeline.note(DECODES, 0.002)
    assert depth(pipeline) == 4  # a step may be late once
    for _ in range(16):
        pipeline.note(DECODES, 0.002)
    assert depth(pipeline) == 2
