"""What the scheduler does in situations chosen one by one, event by event.

The random ones are in `tests/simulation`, which plays all actors against each other.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import ProtocolBug
from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import Abort, StepWanted, Stopping, Tokens, Turn
from nanoactor.runtime.codec import encode
from nanoactor.scheduling.edges import DETOKENIZER
from nanoactor.scheduling.sequences.ids import SeenNumbers
from nanoactor.scheduling.sequences.sequence import Phase
from tests.scheduling.events import (
    SALT,
    admit,
    answered,
    begun,
    done,
    of_kind,
    scheduler,
    turn_of,
)


def admitted(sent):
    """The requests that an event has admitted."""
    return [one.uid for turn in of_kind(sent, Turn) for one in turn.admissions]


def test_nobody_waits_for_a_prefix_whose_owner_is_gone():
    logic = scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    begun(logic, range(40), 1)
    assert admitted(logic.handle(admit(range(40), 1, uid=1))) == []
    assert admitted(logic.handle(Abort(0))) == [1]


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    logic = scheduler(blocks=40, max_num_batched_tokens=64, prefix_caching=False)
    for uid in range(2):
        assert admitted(logic.handle(admit(range(40), 1, uid))) == [uid]


def test_the_queue_is_looked_at_again_when_a_step_has_taken_prompts():
    logic = scheduler(max_num_batched_tokens=8, depth=1, prefix_caching=False)
    first = begun(logic, range(8), 1).plan
    second = turn_of(logic.handle(admit(range(10, 18), 1, uid=1)))
    assert [one.uid for one in second.admissions] == [1]
    assert admitted(logic.handle(admit(range(20, 28), 1, uid=2))) == []
    logic.handle(answered(second, [1]))
    sent = logic.handle(done(first, [5]))
    taken = [*admitted(sent), *admitted(logic.handle(StepWanted(0)))]
    assert taken == [2]


def test_decoding_sequences_are_in_every_step_beside_a_long_prompt():
    logic = scheduler(max_num_batched_tokens=10, depth=1)
    plan = turn_of(logic.handle(done(begun(logic, range(3), 1).plan, [5]))).plan
    logic.handle(answered(turn_of(logic.handle(admit(range(10, 60), 1, uid=1))), [1]))
    for mixed in range(1, 6):
        counts = [1, mixed == 6] if mixed > 1 else ()
        plan = turn_of(logic.handle(done(plan, [5], counts))).plan
        assert logic.statistics.mixed_steps == mixed
        assert logic.statistics.decode_tokens == mixed + 1


def test_who_is_preempted_comes_back_when_its_results_are_in():
    logic = scheduler(depth=3)
    first = turn_of(logic.handle(admit(range(5), 1)))
    logic.handle(answered(first, [0]))
    victim = logic.live[0]
    assert len(logic._pipeline.in_flight) == 3
    logic._grants.preempt(victim)
    turn = turn_of(logic.handle(StepWanted(0)))
    assert turn.frees.tolist() == [0]
    logic.handle(answered(turn, freed=[(3, 2)]))
    assert logic.budget.credits > 2, "there is room at once"
    for step in (1, 2):
        logic.handle(done(None, [40 + step], step=step))
        assert (victim.phase, victim.length) == (Phase.WAITING, 5 + step)
    sent = logic.handle(done(None, [43], step=3))
    assert [one.token_ids[5:].tolist() for one in turn_of(sent).admissions] == [[41, 42, 43]]


def test_what_was_found_first_is_told_though_its_slot_is_given_up():
    """A prompt rides, and is preempted before the answer: what it finds then is its own."""
    logic = scheduler(depth=2)
    first = turn_of(logic.handle(admit(range(8), 1)))
    assert first.plan is not None
    sequence = logic.live[0]
    logic._grants.preempt(sequence)
    logic.handle(answered(first, [0]))
    assert (sequence.slot, sequence.history.cached_tokens) == (-1, 0)


def test_who_starves_longest_is_fed_first():
    """Five sequences need a block each, and blocks come back one by one."""
    logic = scheduler(max_num_seqs=5)
    for uid in range(5):
        turn = turn_of(logic.handle(admit([uid], 1, uid)))
    logic.handle(answered(turn, range(5)))
    one, two, three, four, five = logic._running
    budget = logic.budget
    budget._fenced_blocks.append((1_000, 9))  # so nobody is preempted
    logic._pipeline.planned, budget._credits = 9, 1
    assert logic._grants.grant([two, four]) == [two]
    logic._pipeline.planned, budget._credits = 10, 2
    assert logic._grants.grant([one, two, four, five]) == [four, one]
    logic._pipeline.planned, budget._credits = 11, 1
    assert logic._grants.grant([three, two, five]) == [two]


def test_a_step_in_which_nothing_changes_is_small():
    logic = scheduler(max_num_seqs=8, block_size=64, blocks=64, depth=1)
    manager, turns, steps = BlockManager(64, 64, 8, 64, SALT), [], []

    def heard(event):
        for turn in of_kind(logic.handle(event), Turn):
            turns.append(turn)
            if (step := manager.apply_turn(turn)) is not None:
                steps.append((turn.plan, step))

    for uid in range(8):
        heard(admit([uid, 1, 2], 1, uid))
    heard(manager.take_answer())
    for _ in range(4):
        planned = logic._pipeline.in_flight[0]
        heard(done(steps[-1][0], [1] * planned.num_sampled, planned.counts.tolist()))
    assert logic._pipeline.in_flight[0].num_sampled == 8
    assert len(encode(steps[-1][1]).meta) < 120


@given(st.permutations(range(50)))
def test_seen_numbers_are_remembered_in_bounded_memory(order):
    seen = SeenNumbers()
    for count, number in enumerate(order):
        assert number not in seen
        seen.add(number)
        assert number in seen
        assert len(seen) <= count + 1
    assert len(seen) == 0
    assert 49 in seen
    assert 50 not in seen


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.sets(st.integers(0, 80)))
def test_who_lives_behind_a_death_is_told_from_who_is_over(arrived, below, living):
    """In whatever order: requests may arrive before it is told who is to come."""
    living = {number for number in living if number < below}
    arrived &= living
    seen = SeenNumbers()
    for number in sorted(arrived):
        seen.add(number)
    seen.fill(below, living)
    for number in range(below):
        assert (number in seen) == (number not in living or number in arrived)
    for number in living - arrived:
        seen.add(number)
    assert all(number in seen for number in range(below))
    assert len(seen) == 0


@pytest.mark.parametrize(
    ("output", "reason", "stop_reason"),
    [
        ([5, 7], "stop", None),
        ([5, 9], "stop", 9),
        ([5, 6, 8], "length", None),
        ([7, 5], None, None),
    ],
)
def test_an_answer_that_goes_on_behind_its_end_ends_at_once(output, reason, stop_reason):
    logic = scheduler(depth=2)
    stopping = Stopping(max_tokens=3, min_tokens=0, eos_ids=(7,), stop_ids=(9,))
    event = admit([1, 2, *output], 1)
    spec = dataclasses.replace(event.spec, stopping=stopping)
    event = dataclasses.replace(event, prompt_length=2, spec=spec)
    sent = [message for edge, message in logic.handle(event) if edge == DETOKENIZER]
    ends = [
        finish for message in sent if isinstance(message, Tokens) for finish in message.finishes
    ]
    assert [(end.reason, end.stop_reason) for end in ends] == [(reason, stop_reason)] * bool(reason)
    assert bool(logic.live) == (reason is None)


def test_the_plan_leaves_before_the_tokens_are_forwarded():
    logic = scheduler(depth=1)
    out = logic.handle(done(begun(logic, [1, 2], 1).plan, [5]))
    kinds = [type(message) for _, message in out]
    assert kinds.index(Turn) < kinds.index(Tokens)


def test_requests_that_end_while_they_wait_are_forgotten():
    logic = scheduler(max_num_seqs=1)
    begun(logic, [1, 2], 1)
    logic.handle(admit([3, 4], 1, uid=1))  # comes before all of them
    for uid in range(2, 500):
        logic.handle(admit(range(40), 1, uid, priority=1))
        logic.handle(Abort(uid))
    assert len(logic._room.waiting._ready._heap) < 10


def test_a_result_that_was_not_due_tells_the_story_of_its_sequences():
    logic = scheduler(depth=1)
    plan = begun(logic, [1, 2, 3], 1).plan
    with pytest.raises(
        ProtocolBug, match=r"was due with 1 of \[\]: sequence 0 \(running, slot 0\)"
    ):
        logic.handle(done(plan, [0, 0]))


@pytest.mark.parametrize(
    ("tokens", "counts"), [([5], [1, 0, 0]), ([5, 6], ()), ([5], [1]), ([5, 6], [1, 1])]
)
def test_results_that_lack_a_row_are_refused(tokens, counts):
    """One that decodes, and one whose prompt goes on in the next step."""
    logic = scheduler(max_num_batched_tokens=10, depth=1)
    plan = turn_of(logic.handle(done(begun(logic, range(3), 1).plan, [5]))).plan
    logic.handle(answered(turn_of(logic.handle(admit(range(10, 60), 1, uid=1))), [1]))
    plan = turn_of(logic.handle(done(plan, [5]))).plan
    with pytest.raises(ProtocolBug, match=r"was due with 1 of \[1, 0\]"):
        logic.handle(done(plan, tokens, counts))
