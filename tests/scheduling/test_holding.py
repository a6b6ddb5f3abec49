"""Held answers, event by event."""

import pytest

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Abort, Continue, HoldClock, Tokens, Turn
from nanoactor.scheduling.sequences.sequence import Phase
from tests.scheduling.events import (
    admit,
    answered,
    done,
    int32,
    of_kind,
    rows_of,
    scheduler,
    turn_of,
)


def turn(parents, tokens):
    return Continue(0, int32(*parents), int32(*tokens))


def held(answers=3, length=9, **changes):
    """A scheduler with one request of which all answers are held."""
    logic = scheduler(depth=2, **changes)
    first = turn_of(logic.handle(admit(range(length), answers, logprobs=1, held=True)))
    logic.handle(answered(first, [0]))
    (told,) = of_kind(logic.handle(done(first.plan, [40 + n for n in range(answers)])), Tokens)
    assert told.indices.tolist() == [0] * answers
    return logic


def test_what_is_sampled_is_told_and_nothing_follows():
    logic = held()
    assert logic.figures()["held"] == 3
    assert [s.length for s in logic.live.values()] == [9, 9, 9]
    assert not logic._pipeline.in_flight
    assert not logic.is_stalled  # for its caller, which is no stall


def test_one_that_stays_costs_a_position_and_so_does_a_copy():
    logic = held()
    before = logic.budget.credits
    first = turn_of(logic.handle(turn([0, 0, 2], [5, 6, 7])))
    assert (first.forks.slots.tolist(), first.forks.sources.tolist()) == ([1], [0])
    assert sorted(first.known.slots.tolist()) == [0, 1, 2]
    assert logic.budget.credits == before - 1
    assert sorted(rows_of(first.plan)) == [(0, 9, 1), (1, 9, 1), (2, 9, 1)]
    assert [s.tokens[-1] for s in logic.live.values()] == [5, 6, 7]


def test_all_are_copies_of_what_was_there_before():
    logic = held(answers=2)
    first = turn_of(logic.handle(turn([0, 1], [1, 2])))
    logic.handle(done(first.plan, [0, 0]))
    logic.handle(turn([1, 0], [3, 4]))
    assert [s.tokens[9:].tolist() for s in logic.live.values()] == [[2, 3], [1, 4]]


def test_without_credits_a_copy_waits_for_itself():
    logic = held(blocks=5)  # of which all are spent: two shared, one of its own for each
    first = turn_of(logic.handle(turn([0, 0, 2], [5, 6, 7])))
    assert first.forks is None
    assert first.frees.tolist() == [1]
    assert logic.live[1].phase is Phase.WAITING
    assert logic.live[1].saved_tokens[9:].tolist() == [6]


def test_a_victim_gives_back_what_its_copies_do_not_hold():
    logic = held(answers=2, length=8)
    for _ in range(8):
        first = turn_of(logic.handle(turn([0, 1], [1, 1])))
        logic.handle(done(first.plan, [0, 0]))
    logic.handle(answered(first, shared=[(0, 2), (1, 2)]))
    one, other = logic.live.values()
    assert (one.length, one.blocks, one.num_freeable_blocks) == (16, 4, 2)
    first = turn_of(logic.handle(turn([0, 0], [1, 2])))
    fence = first.plan.step - 1
    logic.handle(answered(first, freed=[(fence, 2)], shared=[(0, 4), (1, 4)]))
    # Four full blocks are both's, those behind the prompt too; each has one of its own.
    assert (one.blocks, one.num_freeable_blocks) == (5, 1)
    assert (other.blocks, other.num_freeable_blocks) == (5, 1)


def test_nobody_goes_on_before_all_have_told():
    logic = held()
    logic.handle(turn([0, 1, 2], [5, 6, 7]))
    with pytest.raises(ProtocolBug, match="not held: sequence 0"):
        logic.handle(turn([0, 1, 2], [5, 6, 7]))


def test_a_turn_that_counts_on_somebody_who_is_over_changes_nothing():
    logic = held()
    logic.handle(Abort(1))
    sent = logic.handle(turn([0, 1, 2], [5, 6, 7]))
    assert not any(each.plan for each in of_kind(sent, Turn))
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
    first = turn_of(logic.handle(admit(range(20, 25), 1, uid=3)))
    assert first.frees.tolist() == [2]
    assert logic.live[2].phase is Phase.HELD
    following = turn_of(logic.handle(answered(first, freed=[(first.fence, 1)])))
    assert [admission.uid for admission in following.admissions] == [3]
    assert logic.figures()["held"] == 3
