"""The gates of free text, for every course that an answer can take."""

import itertools

import numpy as np
import pytest

from nanoactor.grammar.messages import BeginGrammar
from nanoactor.messages import (
    Admit,
    Credits,
    Finish,
    FreeText,
    Plan,
    RequestSpec,
    StepDone,
    Stopping,
    TextOptions,
    Tokens,
)
from nanoactor.models.columns import pack
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.free_text import (
    NO_GATE,
    first_gate,
    must_go_on,
    next_gate,
    watched_ids,
)
from nanoactor.scheduling.scheduler import Scheduler

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
    assert must_go_on(free, CLOSE) == (free.call_id < 0)
    assert not must_go_on(free, CALL if free.call_id >= 0 else NO_GATE)


def test_an_answer_without_free_text_has_no_gates():
    assert first_gate(None) == NO_GATE
    assert watched_ids(None) == ()
    assert not must_go_on(None, NO_GATE)


def ints(*values):
    return np.array(values, np.int32)


def longs(*values):
    return np.array(values, np.int64)


def credits_of(hits=(), refunds=(), uids=(), tainted=()):
    """Of a block manager that has room for everything."""
    matches = longs(*uids), ints(*hits), ints(*refunds)
    return Credits(*matches, ints(), ints(), None, 0, longs(*tainted))


def admitted(uid, grammar, free=None):
    """A prompt of three tokens, answered by 20."""
    options = Stopping(20, 0, (), ()), TextOptions((), False, True, 0)
    spec = RequestSpec(0, pack({}), *options, grammar=grammar)
    return Admit(uid, spec, ints(1, 2, 3), 3, np.zeros((0, 16), np.uint8), free=free)


class Course:
    """One request through a scheduler, up to the step in flight behind the end of its thoughts."""

    def __init__(self):
        shape = dict(blocks=64, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
        self.scheduler = Scheduler(SchedulerConfig(**shape, max_model_len=64, depth=2))
        self.sent = []
        self.tell(admitted(0, "{}", KINDS["thoughts, then the form"]))
        self.tell(credits_of(hits=[0], refunds=[0], uids=[0]))
        self.done(1, OTHER)
        self.done(2, CLOSE)

    def tell(self, event):
        self.sent += [message for _, message in self.scheduler.handle(event)]

    def done(self, step, *tokens, choiceless=()):
        self.tell(StepDone(step, ints(*tokens), 0.001, 0, ints(), [], ints(*choiceless)))

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
    assert [plan.step for plan in course.of(Plan)] == [1, 2, 3]
    course.done(3, OTHER)
    assert course.tokens == [OTHER, CLOSE]
    assert not course.finishes


def test_who_has_read_what_failed_ends_in_the_place_between_free_text_and_form():
    course = Course()
    course.tell(credits_of(tainted=[0]))
    [finish] = course.finishes
    assert finish.reason == "failed"
    assert not course.scheduler.live


def test_a_row_that_is_dropped_may_have_nothing_to_choose_from():
    course = Course()
    course.done(3, OTHER, choiceless=[0])
    assert course.tokens == [OTHER, CLOSE]
    assert not course.finishes
