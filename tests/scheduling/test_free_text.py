"""The gates of free text, for every course that an answer can take."""

import dataclasses
import itertools

import pytest

from nanoactor.messages.engine import Finish, FreeText, Tokens, Turn
from nanoactor.messages.grammar import BeginGrammar
from nanoactor.models.limits import NOTHING_ALLOWED
from nanoactor.scheduling.sequences.free_text import (
    NO_GATE,
    first_gate,
    must_continue,
    next_gate,
    watched_ids,
)
from tests.scheduling.events import admit, answered, done, rows_of, scheduler

THINK, CLOSE, CALL, OTHER = 7, 8, 9, 1
KINDS = {
    "thoughts, then the form": FreeText(True, -1, CLOSE, -1),
    "perhaps thoughts, then the form": FreeText(False, THINK, CLOSE, -1),
    "text, then calls": FreeText(False, -1, -1, CALL),
    "thoughts, text, calls": FreeText(True, -1, CLOSE, CALL),
    "perhaps thoughts, text, calls": FreeText(False, THINK, CLOSE, CALL),
}


def expected(kind, tokens):
    """What the text is, told by searching it."""
    free = KINDS[kind]
    thinks = free.thinks or (free.think_id >= 0 and tokens[:1] == (THINK,))
    rest = tokens[1:] if thinks and not free.thinks else tokens
    if thinks:
        if CLOSE not in rest:
            return CLOSE
        rest = rest[rest.index(CLOSE) + 1 :]
    if free.call_id < 0:
        return NO_GATE
    return NO_GATE if CALL in rest else CALL


@pytest.mark.parametrize("kind", KINDS)
def test_gates_follow_one_another(kind):
    free = KINDS[kind]
    for length in range(6):
        for tokens in itertools.product((THINK, CLOSE, CALL, OTHER), repeat=length):
            gate = first_gate(free)
            for index, token in enumerate(tokens):
                before, gate = gate, next_gate(free, gate, index, token)
                assert gate == before or token in watched_ids(free)
            assert gate == expected(kind, tokens), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_may_end_in_text_but_not_in_thoughts_before_a_form(kind):
    free = KINDS[kind]
    assert must_continue(free, CLOSE) == (free.call_id < 0)
    assert not must_continue(free, CALL if free.call_id >= 0 else NO_GATE)


def test_an_answer_without_free_text_has_no_gates():
    assert first_gate(None) == NO_GATE
    assert watched_ids(None) == ()
    assert not must_continue(None, NO_GATE)


class Course:
    """One request through a scheduler, up to the step in flight behind the end of its thoughts."""

    def __init__(self):
        self.scheduler = scheduler(depth=2)
        self.sent = []
        event = admit([1, 2, 3], 1, grammar="{}")
        self.tell(dataclasses.replace(event, free=KINDS["thoughts, then the form"]))
        self.tell(answered(self.of(Turn)[0], [0]))
        self.done(1, OTHER)
        self.done(2, CLOSE)

    def tell(self, event):
        self.sent += [message for _, message in self.scheduler.handle(event)]

    @property
    def plans(self):
        return [turn.plan for turn in self.of(Turn) if turn.plan]

    def done(self, step, *tokens):
        self.tell(done(self.plans[step - 1], tokens))

    def of(self, kind):
        return [message for message in self.sent if type(message) is kind]

    @property
    def tokens(self):
        return [token for told in self.of(Tokens) for token in told.token_ids.tolist()]

    @property
    def finishes(self) -> list[Finish]:
        return [finish for told in self.of(Tokens) for finish in told.finishes]


def test_what_is_computed_behind_free_text_is_dropped():
    course = Course()
    [begun] = course.of(BeginGrammar)
    assert (begun.position, begun.token_ids.tolist()) == (5, [CLOSE])
    # It keeps its slot and its blocks: the position of what ended the text is computed again.
    assert len(course.of(Turn)[0].admissions) == 1
    assert not any(len(turn.frees) + len(turn.admissions) for turn in course.of(Turn)[1:])
    assert [plan.step for plan in course.plans] == [1, 2, 3, 4]
    assert rows_of(course.plans[3]) == [(0, 4, 1)]
    assert course.plans[3].leaves.tolist() == [0]
    course.done(3, OTHER)
    assert course.tokens == [OTHER, CLOSE]
    assert not course.finishes


def test_who_has_read_what_failed_ends_in_the_place_between_free_text_and_form():
    course = Course()
    course.tell(answered(course.of(Turn)[-1], tainted=[0]))
    [finish] = course.finishes
    assert finish.reason == "failed"
    assert not course.scheduler.live


def test_a_row_that_is_dropped_may_have_nothing_to_choose_from():
    course = Course()
    course.done(3, NOTHING_ALLOWED)
    assert course.tokens == [OTHER, CLOSE]
    assert not course.finishes
