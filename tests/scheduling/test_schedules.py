"""What the scheduler does in situations chosen one by one, event by event.

The random ones are in `tests/simulation`, which plays all actors against each other.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import ProtocolBug
from nanoactor.kv.manager import BlockManager
from nanoactor.messages import Abort, Match, Plan, SampledTokens, Stopping, Tokens
from nanoactor.runtime.codec import encode
from nanoactor.scheduling.edges import TEXT
from nanoactor.scheduling.ids import SeenNumbers
from tests.scheduling.test_forking import SALT, admit, begun, credited, of_kind, scheduler
from tests.scheduling.test_holding import done


def test_nobody_waits_for_a_prefix_whose_owner_is_gone():
    logic = scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    begun(logic, range(40), 1)
    assert not of_kind(logic.handle(admit(range(40), 1, uid=1)), Match)
    (match,) = of_kind(logic.handle(Abort(0)), Match)
    assert match.uid == 1


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    logic = scheduler(max_num_batched_tokens=64, prefix_caching=False)
    for uid in range(2):
        (match,) = of_kind(logic.handle(admit(range(40), 1, uid)), Match)
        assert match.uid == uid


def test_decoding_sequences_are_in_every_step_beside_a_long_prompt():
    logic = scheduler(max_num_batched_tokens=10, depth=1)
    (plan,) = of_kind(logic.handle(done(begun(logic, range(3), 1), [5])), Plan)
    logic.handle(admit(range(10, 60), 1, uid=1))
    logic.handle(credited(matched=[1]))
    for mixed in range(1, 6):
        (plan,) = of_kind(logic.handle(done(plan, [5])), Plan)
        assert logic.statistics.mixed_steps == mixed
        assert logic.statistics.decode_tokens == mixed + 1


def test_who_starves_longest_is_fed_first():
    """Five sequences need a block each, and blocks come back one by one."""
    logic = scheduler(max_num_seqs=5)
    for uid in range(5):
        logic.handle(admit([uid], 1, uid))
    logic.handle(credited(matched=range(5)))
    one, two, three, four, five = logic._running
    budget = logic.budget
    budget._fenced_blocks.append((1_000, 9))  # so nobody is preempted
    logic._planned, budget._credits = 9, 1
    assert logic._feed([two, four]) == [two]
    logic._planned, budget._credits = 10, 2
    assert logic._feed([one, two, four, five]) == [four, one]
    logic._planned, budget._credits = 11, 1
    assert logic._feed([three, two, five]) == [two]


def test_a_step_in_which_nothing_changes_is_small():
    logic = scheduler(max_num_seqs=8, block_size=64, blocks=64, depth=1)
    manager = BlockManager(64, 64, 8, 64, SALT)
    for uid in range(8):
        (match,) = of_kind(logic.handle(admit([uid, 1, 2], 1, uid)), Match)
        manager.match(match)
    (plan,) = of_kind(logic.handle(manager.take_credits()), Plan)
    for token in range(2):
        manager.bind_blocks(plan)
        sent = logic.handle(done(plan, [token] * 8))
        (known,), (plan,) = of_kind(sent, SampledTokens), of_kind(sent, Plan)
        manager.record_tokens(known)
    assert len(encode(manager.bind_blocks(plan)).meta) < 120


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
    sent = [message for edge, message in logic.handle(event) if edge == TEXT]
    ends = [
        finish for message in sent if isinstance(message, Tokens) for finish in message.finishes
    ]
    assert [(end.reason, end.stop_reason) for end in ends] == [(reason, stop_reason)] * bool(reason)
    assert bool(logic.live) == (reason is None)


def test_the_plan_leaves_before_the_tokens_are_forwarded():
    logic = scheduler(depth=1)
    out = logic.handle(done(begun(logic, [1, 2], 1), [5]))
    kinds = [type(message) for _, message in out]
    assert kinds.index(Plan) < kinds.index(Tokens)


def test_requests_that_end_while_they_wait_are_forgotten():
    logic = scheduler(max_num_seqs=1)
    begun(logic, [1, 2], 1)
    logic.handle(admit([3, 4], 1, uid=1))  # comes before all of them
    for uid in range(2, 500):
        logic.handle(admit(range(40), 1, uid, priority=1))
        logic.handle(Abort(uid))
    assert len(logic._waiting._ready._heap) < 10


def test_a_result_that_was_not_due_tells_the_story_of_its_sequences():
    logic = scheduler(depth=1)
    plan = begun(logic, [1, 2, 3], 1)
    with pytest.raises(ProtocolBug, match=r"was due with 1: request 0 \(running, slot 0\)"):
        logic.handle(done(plan, [0, 0]))
