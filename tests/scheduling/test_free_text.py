"""The gates of free text, for every course that an answer can take."""

import itertools

import pytest

from nanoactor.messages import FreeText
from nanoactor.scheduling.free_text import (
    NO_GATE,
    first_gate,
    must_go_on,
    next_gate,
    watched_ids,
)

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
