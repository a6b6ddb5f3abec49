"""Held answers, event by event."""

import numpy as np
import pytest

from nanoactor.errors import ProtocolBug
from nanoactor.grammar.messages import KnownTokens
from nanoactor.messages import (
    Abort,
    Continue,
    Credits,
    Fork,
    Free,
    HoldClock,
    Match,
    Plan,
    StepDone,
    Tokens,
)
from nanoactor.scheduling.sequence import Phase
from tests.scheduling.test_forking import admit, credited, of_kind, scheduler

NONE = np.empty(0, np.int32)


def done(plan, tokens, step=None):
    return StepDone(step or plan.step, np.array(tokens, np.int32), 0.0, 1, NONE, [], NONE)


def turn(parents, tokens):
    return Continue(0, np.array(parents, np.int32), np.array(tokens, np.int32))


def freed(blocks, fence):
    none = np.empty(0, np.int32)
    counts = np.array([blocks], np.int32), np.array([fence], np.int32)
    return Credits(np.empty(0, np.int64), none, none, *counts, None, 0, np.empty(0, np.int64))


def held(answers=3, length=9, **changes):
    """A scheduler with one request of which all answers are held."""
    logic = scheduler(depth=2, **changes)
    asked = admit(range(length), answers, logprobs=1, held=True)
    (match,) = of_kind(logic.handle(asked), Match)
    (plan,) = of_kind(logic.handle(credited(matched=[match.uid])), Plan)
    (told,) = of_kind(logic.handle(done(plan, [40 + n for n in range(answers)])), Tokens)
    assert told.indices.tolist() == [0] * answers
    return logic


def test_what_is_sampled_is_told_and_nothing_follows():
    logic = held()
    assert logic.figures()["held"] == 3
    assert [s.length for s in logic.live.values()] == [9, 9, 9]
    assert logic._plan() is False
    assert not logic.is_waiting  # for its caller, which is no stall


def test_one_that_stays_costs_a_position_and_a_copy_shares_full_blocks():
    logic = held()
    before = logic.budget.credits
    sent = logic.handle(turn([0, 0, 2], [5, 6, 7]))
    kinds = [type(message) for _, message in sent]
    assert kinds.index(Fork) < kinds.index(KnownTokens) < kinds.index(Plan)
    (fork,), (plan,) = of_kind(sent, Fork), of_kind(sent, Plan)
    assert (fork.slots.tolist(), fork.sources.tolist()) == ([1], [0])
    assert logic.budget.credits == before - 1
    rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
    assert sorted(rows) == [(0, 9, 1), (1, 8, 2), (2, 9, 1)]
    assert [s.tokens[-1] for s in logic.live.values()] == [5, 6, 7]


def test_all_are_copies_of_what_was_there_before():
    logic = held(answers=2)
    plan = of_kind(logic.handle(turn([0, 1], [1, 2])), Plan)[0]
    logic.handle(done(plan, [0, 0]))
    logic.handle(turn([1, 0], [3, 4]))
    assert [s.tokens[9:].tolist() for s in logic.live.values()] == [[2, 3], [1, 4]]


def test_without_credits_a_copy_waits_for_itself():
    logic = held(blocks=5)  # of which all are spent: two shared, one of its own for each
    sent = logic.handle(turn([0, 0, 2], [5, 6, 7]))
    assert not of_kind(sent, Fork)
    (free,) = of_kind(sent, Free)
    assert free.slots.tolist() == [1]
    assert logic.live[1].phase is Phase.WAITING
    assert logic.live[1].kept[9:].tolist() == [6]


def test_a_victim_gives_back_what_its_copies_do_not_hold():
    logic = held(answers=2, length=8)
    for _ in range(8):
        sent = logic.handle(turn([0, 1], [1, 1]))
        plan = of_kind(sent, Plan)[0]
        logic.handle(done(plan, [0, 0]))
    first, second = logic.live.values()
    assert (first.length, first.blocks, first.gives_back) == (16, 4, 2)
    plan = of_kind(logic.handle(turn([0, 0], [1, 2])), Plan)[0]
    logic.handle(freed(2, fence=plan.step - 1))
    # Four full blocks are both's, those behind the prompt too; each has one of its own.
    assert (first.blocks, first.gives_back) == (5, 1)
    assert (second.blocks, second.gives_back) == (5, 1)


def test_nobody_goes_on_before_all_have_told():
    logic = held()
    logic.handle(turn([0, 1, 2], [5, 6, 7]))
    with pytest.raises(ProtocolBug, match="not held is request 0"):
        logic.handle(turn([0, 1, 2], [5, 6, 7]))


def test_a_turn_that_counts_on_somebody_who_is_over_changes_nothing():
    logic = held()
    logic.handle(Abort(1))
    sent = logic.handle(turn([0, 1, 2], [5, 6, 7]))
    assert not of_kind(sent, Plan)
    assert [s.length for s in logic.live.values()] == [9, 9]


def test_answers_end_as_their_caller_says():
    logic = held()
    (told,) = of_kind(logic.handle(turn([-1, 1, -1], [0, 5, 0])), Tokens)
    assert [(finish.uid, finish.reason) for finish in told.finishes] == [(0, "stop"), (2, "stop")]
    assert [*logic.live] == [1]


def test_silence_ends_all_answers_after_a_whole_timeout():
    logic = held()
    assert not logic.handle(HoldClock()) + logic.handle(HoldClock())
    (told,) = of_kind(logic.handle(HoldClock()), Tokens)
    assert [finish.reason for finish in told.finishes] == ["expired"] * 3
    assert "hold_timeout" in told.finishes[0].error
    assert not logic.live
    assert not logic.figures()["held"]


def test_who_waits_gets_the_place_of_one_that_is_held():
    logic = held(max_num_seqs=3)
    sent = logic.handle(admit(range(20, 25), 1, uid=3))
    (free,) = of_kind(sent, Free)
    assert free.slots.tolist() == [2]
    assert logic.live[2].phase is Phase.HELD
    (match,) = of_kind(logic.handle(freed(1, fence=free.fence)), Match)
    assert match.uid == 3
    assert logic.figures()["held"] == 3
